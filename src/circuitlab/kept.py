"""The columns in which a store keeps each table, and how a table gets there and back.

What a part holds, what the database holds and what an export holds are these columns;
tables that may grow further columns keep those in the JSON column `more`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from circuitlab.errors import DataError
from circuitlab.sites import PORTS, parse_component
from circuitlab.tables import ACT, EDGE, EVAL, PER_EXAMPLE, PROMPT, canonical_json

CIRCUIT = pa.schema(
    [
        ("circuit_id", pa.string()),
        ("name", pa.string()),
        ("n_edges", pa.int64()),
        ("selector", pa.string()),
        ("provenance", pa.string()),
    ]
)
"""One circuit: `circuit_id` is the digest of its edges, `provenance` (how they were
chosen) a JSON text."""

CIRCUIT_EDGE = pa.schema([("edge", pa.string())])
"""One edge of a circuit a row, in canonical order."""

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
        found = table.select(schema.names).cast(schema)
        if name == "edge":
            _check_edges(found)
        return found
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


def _check_edges(rows: pa.Table) -> None:
    """Raise DataError unless names, ports and layers of every row say the same."""
    ports = rows["port"].combine_chunks().dictionary_encode()
    marks = [
        f"<{port}>" if port in PORTS else "" for port in ports.dictionary.to_pylist()
    ]
    marked = pa.array(marks, pa.string()).take(ports.indices)
    names = _joined(_joined(rows["sender"], rows["receiver"], "->"), marked, "")
    same = pc.call_function("equal", [names, rows["edge"]])
    wrong = pc.index(same, False).as_py()
    if wrong >= 0 or names.null_count:
        raise _edge_invalid(rows, max(wrong, 0))
    for sides in (("sender", "sender_layer"), ("receiver", "receiver_layer")):
        pairs = rows.select(sides).group_by(sides).aggregate([])
        for name, layer in zip(*(column.to_pylist() for column in pairs), strict=True):
            if parse_component(name).layer != layer:
                place = pc.index(rows[sides[0]], name).as_py()
                raise _edge_invalid(rows, place)


def _joined(left: Any, right: Any, between: str) -> pa.ChunkedArray:
    return pc.call_function(
        "binary_join_element_wise", [left, right, pa.scalar(between)]
    )


def _edge_invalid(rows: pa.Table, place: int) -> DataError:
    row = rows.slice(place, 1).select(EDGE.names[:6]).to_pylist()[0]
    return DataError(
        "edge_row_invalid",
        f"row {place}: the edge's name, sender, receiver, port and layers disagree: "
        f"{row}",
        row=place,
        value=row,
    )


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
