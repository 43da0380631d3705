"""Records: a run with its rows, as a store keeps it, and the columns it is kept in.

Takes the things that the stages make (edge tables, read tables, circuits, evaluations)
apart into a run and Arrow tables, and puts them together again. It knows no database
and no file.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa

from circuitlab.errors import ArgumentError, DataError
from circuitlab.sites import ModelShape
from circuitlab.tables import (
    EDGE,
    EVAL,
    PER_EXAMPLE,
    PROMPT,
    ModelInfo,
    Run,
    canonical_json,
)

CIRCUIT = pa.schema(
    [
        ("circuit_id", pa.string()),
        ("name", pa.string()),
        ("n_edges", pa.int64()),
        ("selector", pa.string()),
        ("provenance", pa.string()),
        ("scores_run", pa.string()),
    ]
)
"""One circuit: `circuit_id` is the digest of its edges, `provenance` (how they were
chosen) and `scores_run` (the run whose scores chose them) are JSON texts."""

CIRCUIT_EDGE = pa.schema([("edge", pa.string())])
"""One edge of a circuit a row, in canonical order."""

ACT = pa.schema(
    [
        ("target_id", pa.string()),
        ("kind", pa.string()),
        ("address", pa.string()),
        ("site", pa.string()),
        ("pass", pa.int32()),
        ("position", pa.int32()),
        ("element", pa.string()),
        ("sample_id", pa.string()),
        ("site_key", pa.string()),
        ("alias_group", pa.string()),
        ("method", pa.string()),
        ("reduction", pa.string()),
        ("grain", pa.string()),
        ("score", pa.float64()),
        ("shape", pa.string()),
        ("dtype", pa.string()),
        ("device", pa.string()),
        ("status", pa.string()),
        ("status_reason", pa.string()),
        ("differentiable", pa.bool_()),
        ("retention", pa.string()),
        ("capture_status", pa.string()),
        ("resolution", pa.string()),
        ("frozen_requested", pa.int64()),
        ("frozen_resolved", pa.int64()),
        ("frozen_reached", pa.int64()),
        ("policy_digest", pa.string()),
        ("detached", pa.bool_()),
        ("rescorable", pa.bool_()),
    ]
)
"""The columns that the store keeps as columns of their own for ACT rows; whatever else
a read table has is kept too, in the JSON column `more`."""

KEPT = {
    "edge": EDGE,
    "act": ACT,
    "eval": EVAL,
    "per_example": PER_EXAMPLE,
    "circuit": CIRCUIT,
    "circuit_edge": CIRCUIT_EDGE,
    "prompt": PROMPT,
}
"""Every table of a record by name, with its columns in a store."""

OPEN = ("act", "eval", "per_example")
"""Tables that may have further columns: those go to the JSON column `more`."""

_TYPES = {
    "edge": "circuitlab.tables:EdgeTable",
    "act": "circuitlab.read_table:ReadTable",
    "circuit": "circuitlab.circuits:Circuit",
}


@runtime_checkable
class Savable(Protocol):
    """What a store can save: a run, and attributes that say which rows it has.

    - `rows`: an Arrow table of EDGE, ACT or EVAL rows, as `run.kind` says. Beside it,
      `per_example` may hold PER_EXAMPLE rows. Loading calls the same class with
      `rows=`, `run=` and, if it was there, `per_example=`.
    - or `edges`, a set of edge names, with `shape`, `provenance` and `name`: a circuit.
      Its `run` may be None, or the run whose scores chose it.
    - or `to_record() -> Record`, with the class method `from_record(record)`.
    """

    @property
    def run(self) -> Run | None: ...


@dataclass(frozen=True)
class Record:
    """A run with its rows by table name (the names of `KEPT`).

    `type` is where the class lives that the rows came from, `module:name`.
    """

    run: Run
    tables: Mapping[str, pa.Table]
    type: str = ""

    @cached_property
    def run_id(self) -> str:
        """The content-derived id: parameters, model, data and rows."""
        return self.run.id_for(*(self.tables[name] for name in sorted(self.tables)))


@dataclass(frozen=True)
class Dataset:
    """Prompts as a store keeps them: `table` has the schema PROMPT."""

    table: pa.Table
    digest: str
    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)


def record_of(thing: Any) -> Record:
    """Take a savable thing apart. See `Savable` for what can be saved.

    Raises ArgumentError `not_savable`, DataError `run_missing`.
    """
    if isinstance(thing, Record):
        return thing
    made = type(thing)
    where = f"{made.__module__}:{made.__qualname__}"
    if hasattr(thing, "to_record"):
        found = thing.to_record()
        return Record(found.run, found.tables, found.type or where)
    if isinstance(getattr(thing, "edges", None), (frozenset, set)):
        return _circuit_record(thing, where)
    rows, run = getattr(thing, "rows", None), getattr(thing, "run", None)
    if not isinstance(rows, pa.Table):
        raise ArgumentError(
            "not_savable",
            f"a store can't save a {made.__name__}; it saves edge tables, read tables, "
            "circuits and evaluations",
            value=made.__name__,
        )
    if not isinstance(run, Run):
        raise DataError(
            "run_missing",
            f"this {made.__name__} has no run, so nobody could tell where its numbers "
            "are from; make it with a Run",
            value=made.__name__,
        )
    tables = {run.kind: rows}
    if isinstance(getattr(thing, "per_example", None), pa.Table):
        tables["per_example"] = thing.per_example
    return Record(run, tables, where)


def thing_of(record: Record) -> Any:
    """Put a record together again: the dataclass that was saved.

    A record whose class is not part of this installation comes back as the Record.
    """
    where = record.type or _TYPES.get(record.run.kind, "")
    made = _class_at(where)
    if made is None:
        return record
    if hasattr(made, "from_record"):
        return made.from_record(record)
    if "circuit" in record.tables:
        return made(**_circuit_fields(record))
    fields = {"rows": record.tables[record.run.kind], "run": record.run}
    if "per_example" in record.tables:
        fields["per_example"] = record.tables["per_example"]
    return made(**fields)


def _class_at(where: str) -> Any:
    module, _, name = where.partition(":")
    # A part may come from a stranger: nothing outside this package is imported.
    if not module.startswith("circuitlab.") or not name.isidentifier():
        return None
    try:
        return getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError:
        return None


def dataset_of(prompts: Any) -> Dataset:
    """Take prompts apart. Raises ArgumentError `not_savable`."""
    if isinstance(prompts, Dataset):
        return prompts
    table, digest = getattr(prompts, "table", None), getattr(prompts, "digest", None)
    if not isinstance(table, pa.Table) or not isinstance(digest, str):
        raise ArgumentError(
            "not_savable",
            f"{type(prompts).__name__} holds no prompts; pass a Prompts",
            value=type(prompts).__name__,
        )
    names = ("seed", "prepend_bos", "tokenizer", "dropped")
    facts = {name: getattr(prompts, name, None) for name in names}
    return Dataset(table, digest, prompts.name, facts)


def prompts_of(dataset: Dataset) -> Any:
    """Put prompts together again."""
    made = _class_at("circuitlab.prompts:Prompts")
    if made is None:
        return dataset
    facts = {**dataset.facts, "name": dataset.name}
    facts["dropped"] = tuple(tuple(pair) for pair in facts.get("dropped") or ())
    facts["prepend_bos"] = bool(facts.get("prepend_bos"))
    return made(table=dataset.table, **facts)


def _circuit_record(circuit: Any, where: str) -> Record:
    scores: Run | None = circuit.run
    provenance = dict(getattr(circuit, "provenance", {}))
    edges = list(getattr(circuit, "ordered", None) or sorted(circuit.edges))
    shape: ModelShape | None = getattr(circuit, "shape", None)
    run = Run(
        kind="circuit",
        model=scores.model if scores else _no_model(shape),
        dataset=scores.dataset if scores else "",
        dataset_digest=scores.dataset_digest if scores else "",
        n=scores.n if scores else 0,
        policy={
            "selector": provenance.get("text") or provenance.get("selector") or "edges",
            "scores": scores.policy_digest if scores else None,
            **_metric_of(scores),
        },
        seed=scores.seed if scores else None,
        started_at=scores.started_at if scores else "",
        versions=dict(scores.versions) if scores else {},
        parent=provenance.get("run_id"),
    )
    row = {
        "circuit_id": circuit.id,
        "name": getattr(circuit, "name", ""),
        "n_edges": len(edges),
        "selector": str(provenance.get("selector") or "edges"),
        "provenance": dump_json(provenance),
        "scores_run": dump_json(scores.to_json()) if scores else None,
    }
    tables = {
        "circuit": pa.Table.from_pylist([row], schema=CIRCUIT),
        "circuit_edge": pa.table({"edge": pa.array(edges, pa.string())}),
    }
    return Record(run, tables, where)


def _metric_of(run: Run | None) -> dict[str, Any]:
    if run is None or "metric" not in run.policy:
        return {}
    return {"metric": run.policy["metric"]}


def _no_model(shape: ModelShape | None) -> ModelInfo:
    return ModelInfo("", "", "", "", "", shape)


def _circuit_fields(record: Record) -> dict[str, Any]:
    row = record.tables["circuit"].to_pylist()[0]
    scores = row["scores_run"]
    run = Run.from_json(json.loads(scores)) if scores else None
    return {
        "edges": frozenset(record.tables["circuit_edge"]["edge"].to_pylist()),
        "shape": record.run.model.shape,
        "run": run,
        "provenance": json.loads(row["provenance"]),
        "name": row["name"],
    }


def dump_json(value: object) -> str:
    """JSON text that reads back equal, NaN and infinities included."""
    return json.dumps(value, default=_plain, sort_keys=True, separators=(",", ":"))


def dump_strict_json(value: object) -> str:
    """JSON text that a database parses: NaN and infinities become strings."""
    return canonical_json(_finite(json.loads(dump_json(value))))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()  # type: ignore[attr-defined]
    return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def kept_table(name: str, table: pa.Table) -> pa.Table:
    """The table in the columns that a store keeps: those of `KEPT[name]`.

    Further columns of an open table go to `more`, a JSON text a row. Raises DataError
    `record_schema_invalid`.
    """
    if name not in KEPT:
        raise DataError(
            "record_schema_invalid",
            f"there is no table {name!r}; a store keeps {', '.join(KEPT)}",
            value=name,
            expected=list(KEPT),
        )
    schema = KEPT[name]
    other = [f.name for f in table.schema if not _fits(f, schema)]
    missing = [f.name for f in schema if f.name not in table.schema.names]
    if name not in OPEN:
        if other or missing:
            raise DataError(
                "record_schema_invalid",
                f"the table {name!r} has the columns {', '.join(schema.names)}",
                value=[str(f.name) for f in table.schema],
                expected=schema.names,
            )
        return table.select(schema.names).cast(schema)
    kept = [
        pa.nulls(table.num_rows, f.type)
        if f.name in missing or f.name in other
        else table[f.name].cast(f.type)
        for f in schema
    ]
    more = pa.nulls(table.num_rows, pa.string())
    if other:
        rows = table.select(other).to_pylist()
        more = pa.array([dump_json(row) for row in rows], pa.string())
    return pa.table([*kept, more], names=[*schema.names, "more"])


def _fits(found: pa.Field, schema: pa.Schema) -> bool:
    """Whether a column can be kept under its own name without losing anything."""
    if found.name not in schema.names:
        return False
    wanted = schema.field(found.name).type
    kind = found.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if kind == wanted or pa.types.is_null(kind):
        return True
    if pa.types.is_string(wanted):
        return pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    if pa.types.is_integer(wanted):
        return pa.types.is_integer(kind) and kind.bit_width <= wanted.bit_width
    if pa.types.is_float64(wanted):
        return pa.types.is_floating(kind)
    return str(kind) == str(wanted)


def original_table(kept: pa.Table, schema: pa.Schema) -> pa.Table:
    """The inverse of `kept_table`: the table as it was, in the schema it had."""
    other = [f for f in schema if not _fits_kept(f, kept)]
    more: list[dict[str, Any]] = []
    if other:
        more = [json.loads(text) for text in kept["more"].to_pylist()]
    columns = [
        pa.array([row[f.name] for row in more], f.type)
        if f in other
        else kept[f.name].cast(f.type)
        for f in schema
    ]
    return pa.table(columns, schema=schema)


def _fits_kept(found: pa.Field, kept: pa.Table) -> bool:
    return found.name in kept.schema.names and _fits(found, kept.schema)
