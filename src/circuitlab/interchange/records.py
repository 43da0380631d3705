"""What every format writes and reads: one record an edge, and a circuit of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from circuitlab.circuit import Circuit
from circuitlab.errors import DataError
from circuitlab.sites import ModelShape, parse_edge
from circuitlab.tables import EDGE, EdgeTable, ModelInfo, Run, digest

Record = dict[str, Any]
FACTS = ("score", "stderr", "n", "status")


@dataclass(frozen=True)
class Imported:
    """What a file held: a circuit, and the scores if there were any."""

    circuit: Circuit
    edges: EdgeTable | None = None


def record(name: str, facts: Mapping[str, Any]) -> Record:
    """The EDGE row of one edge. Raises `edge_name_invalid`."""
    edge = parse_edge(name)
    reader = edge.receiver.component
    return {
        "edge": edge.name,
        "sender": edge.sender.name,
        "receiver": reader.name,
        "port": edge.receiver.port,
        "sender_layer": edge.sender.layer,
        "receiver_layer": reader.layer,
        **{key: facts.get(key) for key in FACTS},
    }


def records_of(circuit: Circuit, edges: EdgeTable | None) -> list[Record]:
    """Every edge of the table and of the circuit, in canonical order."""
    found: dict[str, Record] = {}
    if edges is not None:
        for row in edges.rows.select(["edge", *FACTS]).to_pylist():
            found[row["edge"]] = record(row["edge"], row)
    for name in circuit.edges - found.keys():
        found[name] = record(name, {})
    ordered = sorted(found.values(), key=lambda row: parse_edge(row["edge"]).order)
    return [{**row, "in_circuit": row["edge"] in circuit.edges} for row in ordered]


def table_of(
    records: Iterable[Record],
    shape: ModelShape | None,
    source: str,
    run: Run | None = None,
) -> EdgeTable:
    """The scored records as a table, in canonical order.

    Scores from elsewhere get a run that says so; rankings and drawings treat them like
    any. Raises ArgumentError `edge_unknown` for an edge that the shape doesn't have.
    """
    rows = [row for row in records if row["status"] is not None]
    if shape is not None:
        shape.mask_of([row["edge"] for row in rows])
    rows.sort(key=lambda row: parse_edge(row["edge"]).order)
    arrays = [
        pa.array([row.get(field.name) for row in rows], field.type) for field in EDGE
    ]
    if run is None:
        metric = {"name": "imported", "higher_is_better": True}
        model = ModelInfo("imported", "", "", "", "import", shape)
        policy = {"method": "imported", "metric": metric}
        run = Run("edge", model, "imported", digest(source), 0, policy)
    return EdgeTable(pa.table(arrays, schema=EDGE), run)


def imported(
    records: list[Record], shape: ModelShape | None, name: str, source: str
) -> Imported:
    """A circuit of the records in it, and a table if any record has a status."""
    kept = frozenset(row["edge"] for row in records if row["in_circuit"])
    circuit = Circuit(kept, shape, name=name)
    scored = any(row["status"] is not None for row in records)
    return Imported(circuit, table_of(records, shape, source) if scored else None)


def invalid(text: str, value: object) -> DataError:
    """The refusal of a file whose content is not what its format says."""
    return DataError("interchange_invalid", text, value=value)


def json_object(text: str) -> dict[str, Any]:
    """The JSON object of a text. Raises DataError `interchange_invalid`."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise invalid(f"not JSON: {error}", error.pos) from None
    if not isinstance(values, dict):
        raise invalid("the JSON is not an object", type(values).__name__)
    return values


def number(text: str | None, kind: type, where: str) -> Any:
    """A number from a text; None for an empty one. Raises `interchange_invalid`."""
    if text is None or text == "":
        return None
    try:
        return kind(text)
    except ValueError:
        raise invalid(f"{where} is not a number", text) from None


def facts_from_texts(texts: Mapping[str, Any], where: str) -> Record:
    """Score, stderr, n and status from a format that holds texts."""
    facts: Record = {
        "score": number(texts.get("score"), float, f"score of {where}"),
        "stderr": number(texts.get("stderr"), float, f"stderr of {where}"),
        "n": number(texts.get("n"), int, f"n of {where}"),
        "status": texts.get("status") or None,
    }
    if facts["score"] is not None and facts["status"] is None:
        facts["status"] = "ok"
    return facts
