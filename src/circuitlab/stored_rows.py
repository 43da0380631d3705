"""Reading runs and prompts back from the database, as they were saved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import duckdb
import pyarrow as pa

from circuitlab.kept import KEPT, OPEN, original_table
from circuitlab.records import Dataset, Record
from circuitlab.spool import record_from, schema_of

_JOINS = {
    "edge": "join edge_name d using (edge_no)",
    "circuit_edge": "join edge_name d using (edge_no)",
    "act": "left join site s using (site_no)",
}
_FROM_EDGE_NAME = frozenset(
    ("edge", "sender", "receiver", "port", "sender_layer", "receiver_layer")
)


def read_record(con: duckdb.DuckDBPyConnection, run_id: str) -> Record | None:
    """A folded run with its rows in their order; None if it is not folded."""
    query = "select run_no, header from run where run_id = ? and run_no > 0"
    rows = con.execute(query, [run_id]).fetchall()
    if not rows:
        return None
    return read_numbered(con, rows[0][0], json.loads(rows[0][1]))


def read_numbered(
    con: duckdb.DuckDBPyConnection, number: int, head: Mapping[str, Any]
) -> Record:
    """A folded run by its number and its head."""
    tables = {}
    for name, facts in head["files"].items():
        kept = _read(con, name, number)
        tables[name] = original_table(kept, schema_of(facts, name))
    return record_from(head, tables)


def read_dataset(con: duckdb.DuckDBPyConnection, digest: str) -> Dataset | None:
    """A folded set of prompts in its order; None if it is not folded."""
    query = (
        "select dataset_no, header from dataset "
        "where dataset_digest = ? and dataset_no > 0"
    )
    rows = con.execute(query, [digest]).fetchall()
    if not rows:
        return None
    names = ", ".join(f'"{name}"' for name in KEPT["prompt"].names)
    found = con.sql(
        f"select {names} from prompt where dataset_no = ? order by rowid",
        params=[rows[0][0]],
    ).to_arrow_table()
    facts = json.loads(rows[0][1])["dataset"]
    table = found.cast(KEPT["prompt"])
    return Dataset(table, digest, facts["name"], facts["facts"])


def _read(con: duckdb.DuckDBPyConnection, name: str, number: int) -> pa.Table:
    columns = [*KEPT[name].names, *(["more"] if name in OPEN else [])]
    listed = ", ".join(_column(name, column) for column in columns)
    return con.sql(
        f"select {listed} from {name} q {_JOINS.get(name, '')} "
        "where q.run_no = ? order by q.row",
        params=[number],
    ).to_arrow_table()


def _column(table: str, column: str) -> str:
    if table in ("edge", "circuit_edge") and column in _FROM_EDGE_NAME:
        return f'd."{column}"'
    if table == "act" and column == "site_key":
        return "s.site_key"
    return f'q."{column}"'
