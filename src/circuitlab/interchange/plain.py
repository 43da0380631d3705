"""Our own JSON, which holds everything, and CSV for spreadsheets."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import Any

from circuitlab.circuit import Circuit
from circuitlab.interchange.records import (
    FACTS,
    Imported,
    Record,
    facts_from_texts,
    imported,
    invalid,
    json_object,
    record,
    records_of,
    table_of,
)
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable, Run

SCHEMA = "circuitlab_interchange_v1"
COLUMNS = (
    "edge",
    "sender",
    "receiver",
    "port",
    "sender_layer",
    "receiver_layer",
    *FACTS,
    "in_circuit",
)


def json_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """The circuit's JSON with its provenance, and the table with its run.

    NaN and infinities are written as the texts nan, inf and -inf.
    """
    values: dict[str, Any] = {"schema": SCHEMA, "circuit": circuit.to_json()}
    if edges is not None:
        rows = edges.rows.select(["edge", *FACTS]).to_pydict()
        rows |= {key: [_tagged(x) for x in rows[key]] for key in ("score", "stderr")}
        values["edges"] = {"run": edges.run.to_json(), "rows": rows}
    return json.dumps(values, allow_nan=False, ensure_ascii=True)


def _tagged(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)


def read_json(text: str, shape: ModelShape | None = None) -> Imported:
    """Read our JSON, or a Circuit's alone. Raises DataError `interchange_invalid`."""
    values = json_object(text)
    if values.get("schema") != SCHEMA:
        return Imported(_with_shape(Circuit.from_json(values), shape))
    if not isinstance(values.get("circuit"), dict):
        raise invalid("the JSON has no circuit", sorted(values))
    circuit = _with_shape(Circuit.from_json(values["circuit"]), shape)
    if "edges" not in values:
        return Imported(circuit)
    try:
        run = Run.from_json(values["edges"]["run"])
        rows = values["edges"]["rows"]
        columns = {key: rows[key] for key in ("edge", *FACTS)}
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values())]
        records = [record(row["edge"], _untagged(row)) for row in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise invalid("the JSON's edges are not whole", repr(error)) from error
    return Imported(circuit, table_of(records, run.model.shape, text, run))


def _untagged(row: Record) -> Record:
    tags = {key: row[key] for key in ("score", "stderr") if isinstance(row[key], str)}
    return {**row, **{key: float(value) for key, value in tags.items()}}


def _with_shape(circuit: Circuit, shape: ModelShape | None) -> Circuit:
    if shape is None or circuit.shape is not None:
        return circuit
    return Circuit(circuit.edges, shape, None, circuit.provenance, circuit.name)


def csv_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """One edge a line, with a header; `in_circuit` is true or false."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in records_of(circuit, edges):
        row["in_circuit"] = "true" if row["in_circuit"] else "false"
        writer.writerow("" if row[key] is None else _shown(row[key]) for key in COLUMNS)
    return out.getvalue()


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, float) else str(value)


def read_csv(text: str, shape: ModelShape | None = None) -> Imported:
    """Read lines with an `edge` column; the others may be absent.

    Raises DataError `interchange_invalid` with the line.
    """
    rows = list(csv.DictReader(io.StringIO(text)))
    if not rows and not text.startswith("edge"):
        raise invalid("the CSV has no header with an edge column", text[:80])
    records = []
    for line, row in enumerate(rows, start=2):
        kept = (row.get("in_circuit") or "true").strip().lower()
        if not row.get("edge") or kept not in ("true", "false"):
            raise invalid(f"line {line} has no edge, or in_circuit is no truth", row)
        facts = facts_from_texts(row, f"line {line}")
        records.append({**record(row["edge"], facts), "in_circuit": kept == "true"})
    return imported(records, shape, "", text)
