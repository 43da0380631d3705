"""Reading what is folded and what is not yet, as one.

Temporary views, private to one connection, stand before the database's own: the same
selects, with the rows of the parts in the spool beside them. Nothing is copied, and
nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import duckdb
import pyarrow as pa

from circuitlab.folding import DATASET, dataset_row, restored
from circuitlab.kept import KEPT, OPEN
from circuitlab.run_rows import RUN, run_row
from circuitlab.spool import EVENT, Event, Part

_FROM_NAME = """
    split_part(q.edge, '->', 1) as sender,
    regexp_replace(split_part(q.edge, '->', 2), '<.>$', '') as receiver,
    coalesce(nullif(regexp_extract(q.edge, '<(.)>$', 1), ''), 'in') as port,
    try_cast(regexp_extract(q.edge, '^[am](\\d+)', 1) as integer) as sender_layer,
    try_cast(regexp_extract(q.edge, '->[am](\\d+)', 1) as integer) as receiver_layer
"""


def lay_over(
    con: duckdb.DuckDBPyConnection,
    views: Callable[[], Mapping[str, str]],
    parts: Sequence[Part],
    events: Sequence[Event],
) -> None:
    """Make the readable views show these parts and events too.

    Runs that are not folded yet get negative numbers, which meet no folded row.
    """
    if not (parts or events):
        return
    runs = _not_in(con, "select run_id from run", parts, "run")
    sets = _not_in(con, "select dataset_digest from dataset", parts, "dataset")
    again = [p for p in parts if p.kind == "run" and p not in runs]
    said = [*events, *(restored(part) for part in again)]
    if not (runs or sets or said):
        return
    base = con.execute("select current_database()").fetchall()[0][0]
    _beside(con, base, "event", EVENT, [e.row() for e in said], "event_id")
    rows = [{"run_no": -i, **run_row(p.head)} for i, p in enumerate(runs, 1)]
    _beside(con, base, "run", _with("run_no", RUN), rows, "run_id")
    rows = [{"dataset_no": -i, **dataset_row(p)} for i, p in enumerate(sets, 1)]
    _beside(con, base, "dataset", _with("dataset_no", DATASET), rows, "dataset_digest")
    for name, select in views().items():
        table = name.removeprefix("v_")
        whose = sets if table == "prompt" else runs
        files = [part.path(table) for part in whose if table in part.files]
        if table in KEPT and files:
            select = f"({select}) union all by name ({_parts_select(table, files)})"
        con.execute(f"create or replace temp view {name} as {select}")


def _not_in(
    con: duckdb.DuckDBPyConnection, query: str, parts: Sequence[Part], kind: str
) -> list[Part]:
    known = {value for (value,) in con.execute(query).fetchall()}
    return [part for part in parts if part.kind == kind and part.id not in known]


def _with(number: str, schema: pa.Schema) -> pa.Schema:
    return pa.schema([(number, pa.int32()), *schema])


def _beside(
    con: duckdb.DuckDBPyConnection,
    base: str,
    table: str,
    schema: pa.Schema,
    rows: list[dict[str, Any]],
    key: str,
) -> None:
    folded = f'"{base}".main.{table}'
    con.register(f"pending_{table}", pa.Table.from_pylist(rows, schema))
    con.execute(
        f"create or replace temp view {table} as select * from {folded} "
        f"union all by name select * from pending_{table} "
        f"anti join {folded} using ({key})"
    )


def _parts_select(table: str, files: Sequence[str]) -> str:
    """The rows of these files in the columns of the readable view."""
    column = "dataset_digest" if table == "prompt" else "run_id"
    listed = ", ".join("'" + file.replace("'", "''") + "'" for file in files)
    more = ["more"] if table in OPEN else []
    names = ", ".join(f'q."{name}"' for name in [*KEPT[table].names, *more])
    columns = f"q.edge, {_FROM_NAME}" if table == "circuit_edge" else names
    live = "" if table == "prompt" else "anti join hidden using (run_id)"
    return (
        f"select q.{column}, {columns} from read_parquet([{listed}], "
        f"hive_partitioning = true, hive_types = {{'{column}': varchar}}) q {live}"
    )
