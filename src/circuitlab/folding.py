"""Folding: what stands in the spool goes into the database, and then out of the spool.

One transaction a run. A run that is in already is not put in again, so being killed
between the commit and the removal of the part does no harm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import duckdb
import pyarrow as pa

from circuitlab.errors import StoreError
from circuitlab.kept import KEPT, OPEN, dump_json
from circuitlab.migrations import undo
from circuitlab.run_rows import RUN, run_row
from circuitlab.spool import EVENT, Event, Part, Spool


@dataclass(frozen=True)
class Folded:
    """What a fold did. `held_by` says who kept it from the file, if anyone did."""

    runs: int = 0
    pending: int = 0
    damaged: tuple[str, ...] = ()
    held_by: str | None = None
    pid: int | None = None


NEW_EDGES = """
insert into edge_name
select
    (select coalesce(max(edge_no), 0) from edge_name)
    + row_number() over (order by first),
    edge, sender, receiver, port, sender_layer, receiver_layer
from (
    select
        edge,
        min(file_row_number) as first,
        any_value(sender) as sender,
        any_value(receiver) as receiver,
        any_value(port) as port,
        any_value(sender_layer) as sender_layer,
        any_value(receiver_layer) as receiver_layer
    from read_parquet(?, file_row_number = true, hive_partitioning = false)
    anti join edge_name using (edge)
    group by edge
)
"""

NEW_NAMED_EDGES = """
insert into edge_name
select
    (select coalesce(max(edge_no), 0) from edge_name) + row_number() over (),
    edge, sender, receiver, port, sender_layer, receiver_layer
from new_edges anti join edge_name using (edge)
"""

NEW_SITES = """
insert into site
select
    (select coalesce(max(site_no), 0) from site) + row_number() over (order by site_key),
    site_key
from (
    select distinct site_key
    from read_parquet(?, hive_partitioning = false) anti join site using (site_key)
    where site_key is not null
)
"""

_SOURCE = "read_parquet(?, file_row_number = true, hive_partitioning = false) q"


def _plain(table: str, without: Sequence[str] = ()) -> str:
    names = [name for name in KEPT[table].names if name not in without]
    return ", ".join(f"q.{_quoted(name)}" for name in names)


def _quoted(name: str) -> str:
    return f'"{name}"'


def rows_sql(table: str) -> str:
    """The rows of a part's file as the database keeps them, with run_no first."""
    more = ", q.more" if table in OPEN else ""
    if table == "edge":
        names = ("edge", "sender", "receiver", "port", "sender_layer", "receiver_layer")
        columns, joined = (
            f"d.edge_no, {_plain(table, names)}",
            "join edge_name d using (edge)",
        )
    elif table == "circuit_edge":
        columns, joined = "d.edge_no", "join edge_name d using (edge)"
    elif table == "act":
        columns = f"s.site_no, {_plain(table, ('site_key',))}"
        joined = "left join site s using (site_key)"
    else:
        columns, joined = _plain(table), ""
    return (
        "select ?::integer as run_no, q.file_row_number::integer as row, "
        f"{columns}{more} "
        f"from {_SOURCE} {joined} order by q.file_row_number"
    )


def fold_spool(
    con: duckdb.DuckDBPyConnection, spool: Spool, budget: float | None, journal: Path
) -> Folded:
    """Fold events, then parts until the budget (seconds) is used up.

    A damaged part stays where it is, for `store repair`; the others go on. The head of
    each folded run is added to the journal.
    """
    started = time.monotonic()
    parts, said = spool.entries()
    # What was said comes first: a run may have been deleted, and then saved again.
    fold_events(con, spool.events(said))
    for name in said:
        spool.folder.drop(name)
    known = {
        "run": _column(con, "select run_id from run"),
        "dataset": _column(con, "select dataset_digest from dataset"),
    }
    runs, damaged = 0, []
    for count, name in enumerate(parts):
        over = budget is not None and time.monotonic() - started > budget
        if over and count:
            break
        try:
            part = next(iter(spool.parts([name])), None)
            if part is None:
                continue
            _fold_part(con, part, known, journal)
        except StoreError as error:
            if error.code != "store_part_corrupt":
                raise
            damaged.append(name)
            continue
        runs += part.kind == "run"
        spool.folder.drop(name)
    left = spool.entries()[0]
    return Folded(runs, len(left), tuple(damaged))


def _column(con: duckdb.DuckDBPyConnection, query: str) -> set[str]:
    return {value for (value,) in con.execute(query).fetchall()}


def _fold_part(
    con: duckdb.DuckDBPyConnection,
    part: Part,
    known: dict[str, set[str]],
    journal: Path,
) -> None:
    if part.id in known[part.kind]:
        if part.kind == "run":
            _saved_again(con, part)
        return
    part.content()
    if part.kind == "dataset":
        _fold_dataset(con, part)
    else:
        # Edges that were never seen before are rare: once a model.
        number = _fold_run(con, part, names_first=False)
        number = number or _fold_run(con, part, names_first=True)
        with journal.open("a", encoding="utf-8") as file:
            file.write(dump_json({"run_no": number, "head": part.head}) + "\n")
    known[part.kind].add(part.id)


def _fold_run(
    con: duckdb.DuckDBPyConnection, part: Part, *, names_first: bool
) -> int | None:
    """Put a run in, in one transaction; its number, or None if names are missing."""
    con.execute("begin")
    try:
        number = _next(con, "run", "run_no")
        _insert(con, "run", RUN, run_row(part.head), number)
        for table, facts in part.files.items():
            path = part.path(table)
            if table == "act":
                con.execute(NEW_SITES, [path])
            if names_first:
                _add_names(con, part, table)
            query = f"insert into {table} by name {rows_sql(table)}"
            put = con.execute(query, [number, path]).fetchall()[0][0]
            if put != facts["rows"] and not names_first:
                con.execute("rollback")
                return None
            if put != facts["rows"]:
                raise StoreError(
                    "store_part_corrupt",
                    f"run {part.id[:12]}: {put} of {facts['rows']} {table} rows could "
                    "be read; `circuitlab store repair` sets it aside",
                    id=part.id,
                    value=put,
                    expected=facts["rows"],
                )
        con.execute("commit")
    except (duckdb.Error, StoreError):
        undo(con)
        raise
    return number


def _add_names(con: duckdb.DuckDBPyConnection, part: Part, table: str) -> None:
    if table == "edge":
        con.execute(NEW_EDGES, [part.path(table)])
    elif table == "circuit_edge":
        con.register(
            "new_edges", edge_name_rows(part.kept()[table]["edge"].to_pylist())
        )
        con.execute(NEW_NAMED_EDGES)
        con.unregister("new_edges")


def edge_name_rows(names: Sequence[str]) -> pa.Table:
    """Rows of `edge_name` without numbers, from names alone."""
    from circuitlab.sites import parse_edge

    edges = [parse_edge(name) for name in dict.fromkeys(names)]
    readers = [edge.receiver.component for edge in edges]
    return pa.table(
        {
            "edge": pa.array([edge.name for edge in edges], pa.string()),
            "sender": pa.array([edge.sender.name for edge in edges], pa.string()),
            "receiver": pa.array([reader.name for reader in readers], pa.string()),
            "port": pa.array([edge.receiver.port for edge in edges], pa.string()),
            "sender_layer": pa.array([e.sender.layer for e in edges], pa.int32()),
            "receiver_layer": pa.array([r.layer for r in readers], pa.int32()),
        }
    )


def _fold_dataset(con: duckdb.DuckDBPyConnection, part: Part) -> None:
    con.execute("begin")
    try:
        number = _next(con, "dataset", "dataset_no")
        _insert(con, "dataset", DATASET, dataset_row(part), number)
        con.execute(
            f"insert into prompt by name "
            f"select ?::integer as dataset_no, {_plain('prompt')} from "
            f"{_SOURCE} order by q.file_row_number",
            [number, part.path("prompt")],
        )
        con.execute("commit")
    except duckdb.Error:
        undo(con)
        raise


DATASET = pa.schema(
    [
        ("dataset_digest", pa.string()),
        ("name", pa.string()),
        ("n", pa.int64()),
        ("seed", pa.int64()),
        ("prepend_bos", pa.bool_()),
        ("tokenizer", pa.string()),
        ("header", pa.string()),
        ("saved_at", pa.timestamp("us")),
    ]
)
"""The columns of `dataset`, but for `dataset_no`, which a store gives."""


def dataset_row(part: Part) -> dict[str, object]:
    """The row of `dataset` for the part of a prompt set."""
    facts = part.head["dataset"]["facts"]
    return {
        "dataset_digest": part.id,
        "name": part.head["dataset"]["name"],
        "n": part.files["prompt"]["rows"],
        **{name: facts.get(name) for name in ("seed", "prepend_bos", "tokenizer")},
        "header": dump_json(part.head),
        "saved_at": _saved_at(part),
    }


def _saved_at(part: Part):
    return Event(part.id, "restore", at=part.head["saved_at"]).row()["said_at"]


def fold_events(con: duckdb.DuckDBPyConnection, events: Sequence[Event]) -> None:
    """Put events in that are not in yet, in one transaction."""
    if not events:
        return
    con.register("said", pa.Table.from_pylist([e.row() for e in events], EVENT))
    con.execute(
        "insert into event by name select * from said anti join event using (event_id)"
    )
    con.unregister("said")


def _saved_again(con: duckdb.DuckDBPyConnection, part: Part) -> None:
    """Saving a deleted run once more brings it back."""
    again = restored(part)
    gone = con.execute(
        "select 1 from v_tombstone where run_id = ? and deleted_at < ?",
        [part.id, again.row()["said_at"]],
    ).fetchall()
    if gone:
        fold_events(con, [again])


def restored(part: Part) -> Event:
    """The event of having saved this part, for a run that may have been deleted."""
    saved = part.head["saved_at"]
    return Event(part.id, "restore", None, saved, f"saved-{part.id}-{saved}")


def _next(con: duckdb.DuckDBPyConnection, table: str, column: str) -> int:
    query = f"select coalesce(max({column}), 0) + 1 from {table}"
    return con.execute(query).fetchall()[0][0]


def _insert(
    con: duckdb.DuckDBPyConnection, table: str, schema: pa.Schema, row: dict, no: int
) -> None:
    con.register("new_row", pa.Table.from_pylist([row], schema))
    query = (
        f"insert into {table} by name select ?::integer as {table}_no, * from new_row"
    )
    con.execute(query, [no])
    con.unregister("new_row")
