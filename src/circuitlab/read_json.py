"""JSON `read_table_v1`: a scalar read table as one standalone file, fail-closed.

The seed's columns stand in `provenance` and `rows`; what circuitlab adds (the run, and
the columns `stderr` and `n`) in an object of its own. NaN and infinities are tagged,
`{"float": "nan"}`, so that every table that saves also loads. Whatever is not exactly
right is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pyarrow as pa

from circuitlab.errors import CircuitlabError, DataError
from circuitlab.sites import parse_edge
from circuitlab.tables import ACT, STATUSES, ModelInfo, Run

if TYPE_CHECKING:
    from circuitlab.read_table import ReadTable

SCHEMA_VERSION = "read_table_v1"
MAX_BYTES = 512 << 20
METHODS = ("activation_x_grad", "grad", "activation")
REDUCTIONS = ("sum", "mean", "sum_of_abs", "abs_of_sum", "l2", "max_abs")
EDGE_REDUCTION = "sum_positions_mean_examples"
RESOLUTIONS = ("exact", "fused_parent", "derived")
_PROVENANCE: dict[str, Any] = {
    "trace_label": None,
    "capture_outcome": None,
    "target_reprs": {},
    "within_digest": None,
    "population_size": None,
    "excluded_counts": {},
    "frozen_policy": None,
    "frozen_digest": None,
    "frozen_requested_count": 0,
    "frozen_resolved_count": 0,
    "frozen_fired_count": 0,
    "alias_group_count": 0,
    "aliased_site_count": 0,
    "batching_plan": None,
    "autograd_calls": 0,
    "timing_s": 0.0,
    "result_bytes": 0,
    "sample_count": None,
    "warnings": [],
}
_OURS = ("stderr", "n")

Check = Callable[[Any], bool]


def dump(table: ReadTable) -> str:
    """The table as text; its caller has refused tensor-bearing tables."""
    found = dict(table.provenance)
    provenance = {name: found.pop(name, value) for name, value in _PROVENANCE.items()}
    provenance |= {"schema_version": SCHEMA_VERSION, "rescorable": False}
    names = [*_ROW]
    columns = {name: table.column(name) for name in names if name != "value"}
    columns["value"] = [None] * len(table)
    columns["rescorable"] = [False] * len(table)
    rows = [dict(zip(names, row)) for row in zip(*(columns[n] for n in names))]
    value = {
        "schema_version": SCHEMA_VERSION,
        "provenance": provenance,
        "rows": rows,
        "circuitlab": {
            "run": {**table.run.to_json(), "provenance": dict(table.run.provenance)},
            "columns": {name: table.column(name) for name in _OURS},
        },
    }
    text = json.dumps(_tagged(value), sort_keys=True, indent=1, allow_nan=False)
    return text + "\n"


def read_file(path: Path) -> bytes:
    """A file's bytes. Raises DataError `read_table_artifact_invalid`."""
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            _refuse(f"the file has {size:,} bytes; at most {MAX_BYTES:,} are read")
        return path.read_bytes()
    except OSError as error:
        _refuse(f"the file can't be read: {error.strerror}", path=str(path))


def parse(text: str | bytes) -> tuple[pa.Table, Run]:
    """The rows and the run of a table. Raises `read_table_artifact_invalid`."""
    value = _parsed(text)
    wanted = {"schema_version", "provenance", "rows"}
    _keys(value, wanted, "the table", optional={"circuitlab"})
    if value["schema_version"] != SCHEMA_VERSION:
        _refuse(
            f"schema_version is {value['schema_version']!r}, not {SCHEMA_VERSION!r}",
            value=value["schema_version"],
            expected=SCHEMA_VERSION,
        )
    _keys(
        value["provenance"],
        {*_PROVENANCE, "schema_version", "rescorable"},
        "provenance",
    )
    if not isinstance(value["rows"], list):
        _refuse("rows is no list")
    rows = [_row(row, i) for i, row in enumerate(value["rows"])]
    ours = _ours(value.get("circuitlab"), len(rows))
    _one_kind(rows)
    provenance = {
        name: item for name, item in value["provenance"].items() if name in _PROVENANCE
    }
    run = _run(ours.get("run"), provenance, rows)
    columns = ours.get("columns") or {name: [None] * len(rows) for name in _OURS}
    _check_unique(rows)
    try:
        return _table(rows, columns), run
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError) as error:
        _refuse(f"a column has a value of a wrong type: {error}")


# --- tagged numbers ---


def _tagged(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, Mapping):
        return {str(key): _tagged(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_tagged(item) for item in value]
    return value


def _untagged(pairs: list[tuple[str, Any]]) -> Any:
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        _refuse(f"an object names a key twice: {names}", value=names)
    if names == ["float"]:
        if pairs[0][1] not in ("nan", "inf", "-inf"):
            _refuse(f"{pairs[0][1]!r} is no tagged number", value=str(pairs[0][1]))
        return float(pairs[0][1])
    return dict(pairs)


def _parsed(text: str | bytes) -> Any:
    def refuse_constant(token: str) -> NoReturn:
        _refuse(f"{token} is not JSON; write it tagged, {{'float': 'nan'}}")

    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        if len(text) > MAX_BYTES:
            _refuse(f"the text is longer than {MAX_BYTES:,}")
        return json.loads(
            text, object_pairs_hook=_untagged, parse_constant=refuse_constant
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        _refuse(f"it is not JSON: {error}")


# --- rows ---


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _one_of(*allowed: str) -> Check:
    return lambda value: isinstance(value, str) and value in allowed


def _is_shape(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(item) for item in value)


_ROW: dict[str, Check] = {
    "target_id": _or_none(_is_text),
    "kind": _one_of("ACT", "EDGE"),
    "address": lambda value: isinstance(value, list),
    "site_key": _is_text,
    "alias_group": _or_none(_is_text),
    "method": _is_text,
    "reduction": _or_none(_is_text),
    "grain": _one_of("site"),
    "score": _or_none(_is_number),
    "value": lambda value: value is None,
    "shape": _or_none(_is_shape),
    "dtype": _or_none(_is_text),
    "device": _or_none(_is_text),
    "status": _one_of(*STATUSES),
    "status_reason": _or_none(_is_text),
    "differentiable": _or_none(_is_flag),
    "retention": _or_none(_is_text),
    "capture_status": _or_none(_is_text),
    "resolution": _one_of(*RESOLUTIONS),
    "frozen_requested": _or_none(_is_count),
    "frozen_resolved": _or_none(_is_count),
    "frozen_reached": _or_none(_is_count),
    "policy_digest": _or_none(_is_text),
    "detached": _or_none(_is_flag),
    "sample_id": _or_none(_is_text),
    "rescorable": _is_flag,
}


def _row(row: Any, number: int) -> dict[str, Any]:
    _keys(row, set(_ROW), f"row {number}")
    for name, check in _ROW.items():
        if not check(row[name]):
            _refuse(
                f"row {number}: {name} is {row[name]!r}, which it can't be",
                row=number,
                column=name,
                value=repr(row[name])[:80],
            )
    if (row["status"] == "ok") != (row["score"] is not None):
        _refuse(
            f"row {number}: the status {row['status']} goes with "
            f"{'a' if row['status'] == 'ok' else 'no'} score",
            row=number,
            column="score",
        )
    _check_method(row, number)
    return {**row, **_place(row, number)}


def _check_method(row: dict[str, Any], number: int) -> None:
    act = row["kind"] == "ACT"
    first = (row["reduction"] or "").split("|")[0]
    method_fits = not act or row["method"] in METHODS
    if not method_fits or first not in (REDUCTIONS if act else (EDGE_REDUCTION,)):
        _refuse(
            f"row {number}: {row['kind']} rows have no method {row['method']!r} with "
            f"the reduction {row['reduction']!r}",
            row=number,
            column="reduction" if method_fits else "method",
        )


def _place(row: dict[str, Any], number: int) -> dict[str, Any]:
    """The address as columns."""
    address, sample = row["address"], row["sample_id"]
    if row["kind"] == "EDGE":
        if len(address) == 1 and _is_text(address[0]) and sample is None:
            try:
                name = parse_edge(address[0]).name
            except CircuitlabError as error:
                _refuse(f"row {number}: {error}", row=number, column="address")
            if name == address[0]:
                return {"address": name, "site": None, "pass": None}
        _refuse(f"row {number}: {address!r} is no edge's address", row=number)
    tail = [] if sample is None else [sample]
    fits = len(address) == 2 + len(tail) and address[2:] == tail
    if not fits or not _is_text(address[0]) or not _is_count(address[1]):
        _refuse(
            f"row {number}: {address!r} is no site's address", row=number, value=address
        )
    text = address_text(address[0], address[1], sample)
    return {"address": text, "site": address[0], "pass": address[1]}


def address_text(site: str, number: int, sample: str | None = None) -> str:
    """How an ACT address is spelled in one column: `site:pass`, `site:pass#sample`."""
    return f"{site}:{number}" if sample is None else f"{site}:{number}#{sample}"


def _one_kind(rows: list[dict[str, Any]]) -> None:
    kinds = {row["kind"] for row in rows}
    if len(kinds) > 1:
        _refuse("a table holds ACT or EDGE rows, not both", value=sorted(kinds))


def _check_unique(rows: list[dict[str, Any]]) -> None:
    seen: set[tuple[Any, ...]] = set()
    for number, row in enumerate(rows):
        key = (row["target_id"], row["address"])
        if key in seen:
            _refuse(f"row {number} repeats the key {key}", row=number, value=key)
        seen.add(key)


# --- what is ours ---


def _ours(found: Any, count: int) -> dict[str, Any]:
    if found is None:
        return {}
    _keys(found, {"run", "columns"}, "circuitlab")
    _keys(found["columns"], set(_OURS), "circuitlab.columns")
    checks = {"stderr": _or_none(_is_number), "n": _or_none(_is_count)}
    for name, check in checks.items():
        column = found["columns"][name]
        fits = isinstance(column, list) and len(column) == count
        if not fits or not all(check(item) for item in column):
            _refuse(f"circuitlab.columns.{name} doesn't fit the rows", column=name)
    return found


def _run(found: Any, provenance: Mapping[str, Any], rows: list[dict[str, Any]]) -> Run:
    """The run that was saved, or what a table of another tool tells of one."""
    kind = "edge" if rows and rows[0]["kind"] == "EDGE" else "act"
    if found is None:
        policy = {name: rows[0][name] for name in ("method", "reduction") if rows}
        info = ModelInfo("", "", "", "", "", None)
        n = provenance["sample_count"] or 0
        return Run(kind, info, "", "", n, policy, provenance)
    try:
        run = Run.from_json(found)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        _refuse(f"circuitlab.run is no run: {error}")
    if run.kind != kind:
        _refuse(f"a run of kind {run.kind!r} has no {kind.upper()} rows")
    return run


def _table(rows: list[dict[str, Any]], columns: Mapping[str, list]) -> pa.Table:
    found: dict[str, list] = {f.name: [row.get(f.name) for row in rows] for f in ACT}
    found["shape"] = [
        None if row["shape"] is None else "x".join(map(str, row["shape"]))
        for row in rows
    ]
    # What a fresh table says; a loaded one is not rescorable whatever stands here.
    found["rescorable"] = [row["kind"] == "ACT" for row in rows]
    found |= dict(columns)
    return pa.table([pa.array(found[f.name], f.type) for f in ACT], schema=ACT)


def _keys(
    value: Any, wanted: set[str], where: str, optional: set[str] | None = None
) -> None:
    if not isinstance(value, dict):
        _refuse(f"{where} is no object", value=type(value).__name__)
    missing = sorted(wanted - set(value))
    unknown = sorted(set(value) - wanted - (optional or set()))
    if missing or unknown:
        _refuse(
            f"{where} lacks {missing} and has the unknown {unknown}",
            missing=missing,
            unknown=unknown,
        )


def _refuse(text: str, **fields: object) -> NoReturn:
    raise DataError(
        "read_table_artifact_invalid",
        f"this is no read_table_v1 that can be trusted: {text}",
        **fields,
    )
