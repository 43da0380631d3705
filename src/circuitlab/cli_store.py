"""Commands on the store: runs, sql, export, import, and its upkeep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import load_circuit, load_edges, open_store, run_of
from circuitlab.cli_output import print_csv, print_json, remark, say, show
from circuitlab.errors import ArgumentError, StoreError

RUN_COLUMNS = (
    "run_id", "kind", "task", "model", "method", "metric", "ablation", "n",
    "saved_at", "tags", "note",
)  # fmt: skip
JSON_COLUMNS = ("policy", "provenance", "versions", "row_counts")

store_app = typer.Typer(no_args_is_help=True, help="Look after a store.")


def runs(
    kind: Annotated[
        str | None, typer.Option(help="Only edge, act, circuit or eval runs.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only this task or file.")] = None,
    model: Annotated[str | None, typer.Option(help="Only this model.")] = None,
    tag: Annotated[str | None, typer.Option(help="Only runs with this tag.")] = None,
    limit: Annotated[int | None, typer.Option(help="Only the newest.")] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """List the runs of a store, newest first.

    Example: circuitlab runs --kind edge --limit 5
    """
    wanted = {"kind": kind, "task": task, "model": model, "tag": tag}
    equal = {name: value for name, value in wanted.items() if value is not None}
    found = open_store(store).runs(limit, **equal)
    rows = [_plain(row) for row in found.to_pylist()]
    if as_json:
        print_json(rows)
    elif as_csv:
        print_csv(found.column_names, rows)
    else:
        shown = [c for c in RUN_COLUMNS if any(row.get(c) for row in rows)]
        show(shown or RUN_COLUMNS[:4], rows)


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    """A run's row with its JSON texts read and its times as text."""
    for name in JSON_COLUMNS:
        if isinstance(row.get(name), str):
            row[name] = json.loads(row[name])
    for name in ("saved_at", "started_at"):
        if row.get(name) is not None:
            row[name] = row[name].isoformat(sep=" ", timespec="seconds")
    return row


def sql(
    query: Annotated[
        str | None,
        typer.Argument(help='A SELECT, or @name for a named query; "-" reads stdin.'),
    ] = None,
    param: Annotated[
        list[str] | None,
        typer.Option(help="A value for $name in the query: --param name=value."),
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(help="Write the rows to this Parquet file.")
    ] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Ask the store with SQL.

    Without a query, the named ones are listed.

    Views: v_run, v_edge, v_act, v_circuit, v_circuit_edge, v_eval, v_per_example,
    v_prompt, v_dataset, v_tag, v_note.

    Example: circuitlab sql "select edge, score from v_edge order by score limit 10"
    """
    if query is None:
        show(("query", "parameters", "about"), _named_queries(), as_json=as_json,
             as_csv=as_csv)  # fmt: skip
        return
    query = _stdin() if query == "-" else query
    values = dict(_pair(text) for text in param or [])
    opened = open_store(store)
    if query.startswith("@"):
        found = opened.query(query, **values)
    else:
        found = opened.sql(query, values or None)
    if parquet is None:
        show(found.column_names, found.to_pylist(), as_json=as_json, as_csv=as_csv)
        return
    import pyarrow.parquet as pq

    pq.write_table(found, parquet)
    remark(f"{found.num_rows:,} rows in {parquet}")


def _named_queries() -> list[dict[str, str]]:
    from circuitlab.queries import named_queries

    return [
        {
            "query": f"@{name}",
            "parameters": ", ".join(query.names),
            "about": query.about,
        }
        for name, query in named_queries().items()
    ]


def _stdin() -> str:
    import sys

    return sys.stdin.read()


def _pair(text: str) -> tuple[str, object]:
    """`name=value`; a value that is JSON is read as such, any other is a text."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(
            "parameter_invalid", f"--param {text!r}: write name=value", value=text
        )
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


FORMATS = (".json", ".graphml", ".dot", ".gv", ".csv", ".svg")


def export(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help="A folder, or a URL that fsspec knows, for runs as Parquet; or a file "
            "for one circuit: .json, .graphml, .dot, .csv or .svg.",
        ),
    ],
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]…", help="Which runs or circuits, all by default."),
    ] = None,
    file_format: Annotated[
        str | None,
        typer.Option("--format", help="Of a circuit's .json: json, eap-ig or mib."),
    ] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Write runs as Parquet, or a circuit as a file.

    Runs go with their prompts, tags and notes, and with the circuit inside which they
    searched; `circuitlab import` reads them back.

    Example: circuitlab export circuit.json 3f2a9c --format eap-ig
    """
    opened = open_store(store)
    if file_format or Path(where).suffix.lower() in FORMATS:
        _export_circuit(opened, Path(where), ids or [], file_format)
        _told([where], f"written: {where}", as_json)
        return
    found = opened.export(_with_universes(opened, ids) if ids else None, where)
    _told(found, f"{len(found)} runs in {where}", as_json)


def _with_universes(store: Any, ids: list[str]) -> list[str]:
    """The runs named, and the circuits among whose edges they looked, without which they
    can't be made again."""
    runs = [run_of(store, any_id, edges_only=True) for any_id in ids]
    query = """
        select r.run_id, arg_min(c.run_id, s.saved_at) as universe
        from v_run r join v_circuit c on c.circuit_id = r.policy ->> '$.universe'
        join v_run s on s.run_id = c.run_id and s.kind = 'circuit'
        where list_contains(?, r.run_id) group by r.run_id order by r.run_id
    """
    found = store.sql(query, [runs]).to_pylist()
    return list(dict.fromkeys([*runs, *(row["universe"] for row in found)]))


def _export_circuit(store: Any, path: Path, ids: list[str], file_format: Any) -> None:
    """Write one circuit, with the scores that chose it where they are in the store."""
    from circuitlab.circuits import Circuit
    from circuitlab.draw import circuit_svg
    from circuitlab.interchange import export_circuit

    if len(ids) != 1:
        raise ArgumentError(
            "selection_ambiguous",
            f"a file holds one circuit; name one, not {len(ids)}",
            value=ids,
        )
    circuit, _ = load_circuit(store, ids[0])
    if not isinstance(circuit, Circuit):
        circuit, edges = Circuit(frozenset(circuit.rows["edge"].to_pylist())), circuit
        circuit = replace(circuit, shape=edges.shape, run=edges.run)
    else:
        edges = _scores(store, circuit)
    if path.suffix.lower() == ".svg":
        path.write_text(circuit_svg(circuit, edges), encoding="utf-8")
    else:
        export_circuit(path, circuit, edges, format=file_format)


def _scores(store: Any, circuit: Any) -> Any:
    """The scores that chose a circuit; None where this store has them not."""
    run_id = circuit.provenance.get("run_id")
    try:
        return load_edges(store, run_id) if run_id else None
    except StoreError as error:
        if error.code == "run_unknown":
            return None
        raise


def import_(
    where: Annotated[
        str,
        typer.Argument(
            metavar="WHERE",
            help="A folder that `export` wrote, or a URL of it; or a circuit's file "
            "(.json, also EAP-IG's and MIB's, .graphml, .dot, .csv).",
        ),
    ],
    file_format: Annotated[
        str | None, typer.Option("--format", help="Of a circuit's file: eap-ig, mib, …")
    ] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Take in runs that were exported, or a circuit.

    Every run is verified against its id; what is here already stays as it is.

    Example: circuitlab import shared_runs
    """
    opened = open_store(store)
    if file_format or Path(where).suffix.lower() in FORMATS:
        from circuitlab.interchange import import_circuit

        form: Any = file_format
        with opened:
            circuit = import_circuit(where, format=form).circuit
            saved = opened.save(circuit)
        text = f"{len(circuit):,} edges\ncircuit {circuit.id}\nrun {saved}"
        _told([saved], text, as_json)
        return
    ids = opened.import_(where)
    _told(ids, f"{len(ids)} runs in {opened.path}", as_json)


def _told(ids: list[str], text: str, as_json: bool) -> None:
    if as_json:
        print_json(ids)
    else:
        say(text)


@store_app.command()
def merge(
    other: Annotated[
        str, typer.Argument(metavar="STORE", help="The store to take runs from.")
    ],
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Take in every run of another store.

    Example: circuitlab store merge ../their/circuitlab.duckdb
    """
    opened = open_store(store)
    ids = opened.merge(other)
    _told(ids, f"{len(ids)} runs taken in", as_json)


@store_app.command()
def check(
    deep: Annotated[
        bool, typer.Option("--deep", help="Read every row, and derive every id again.")
    ] = False,
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Look for damage; exit with 3 if there is any.

    Example: circuitlab store check --deep
    """
    found = open_store(store).check(deep=deep)
    problems = [vars(problem) for problem in found.problems]
    if as_json:
        print_json({**vars(found), "problems": problems})
    else:
        if problems:
            show(("code", "text", "id"), problems)
        say(
            f"{found.runs} runs folded, {found.pending} waiting, {len(problems)} problems"
        )
    if problems:
        raise typer.Exit(3)


@store_app.command()
def repair(store: opt.Store = None, as_json: opt.Json = False) -> None:
    """Set damaged files aside, and save what they still give.

    Nothing is deleted.

    Example: circuitlab store repair
    """
    found = open_store(store).repair()
    unreadable = [vars(problem) for problem in found.unreadable]
    if as_json:
        print_json({**vars(found), "unreadable": unreadable})
        return
    say(f"{len(found.saved)} runs saved, {len(found.lost)} lost")
    for what in ("lost", "set_aside"):
        for name in getattr(found, what):
            say(f"  {what.replace('_', ' ')}: {name}")
    if unreadable:
        show(("code", "text", "id"), unreadable)


@store_app.command()
def fold(store: opt.Store = None, as_json: opt.Json = False) -> None:
    """Move what waits in the spool into the DuckDB file.

    Saves and reads need no fold; a raw DuckDB shell sees what has been folded.

    Example: circuitlab store fold
    """
    found = open_store(store).fold()
    if as_json:
        print_json(vars(found))
        return
    say(f"{found.runs} runs folded, {found.pending} waiting")
    if found.held_by:
        remark(f"{found.held_by} (pid {found.pid}) has the file open; try again later")


@store_app.command()
def tag(
    run_id: opt.RunId,
    tags: Annotated[list[str], typer.Argument(help="One or more tags.")],
    remove: Annotated[bool, typer.Option(help="Take the tags away.")] = False,
    store: opt.Store = None,
) -> None:
    """Give a run tags, or take them away.

    Example: circuitlab store tag 3f2a9c baseline
    """
    with open_store(store) as opened:
        (opened.untag if remove else opened.tag)(run_id, *tags)


@store_app.command()
def note(
    run_id: opt.RunId,
    text: Annotated[str, typer.Argument(help="What to remember.")],
    store: opt.Store = None,
) -> None:
    """Write a note on a run.

    Example: circuitlab store note 3f2a9c "the one in figure 2"
    """
    with open_store(store) as opened:
        opened.note(run_id, text)


@store_app.command()
def delete(run_id: opt.RunId, store: opt.Store = None) -> None:
    """Hide a run from every view; `restore` brings it back.

    Example: circuitlab store delete 3f2a9c
    """
    with open_store(store) as opened:
        opened.delete(run_id)


@store_app.command()
def restore(run_id: opt.RunId, store: opt.Store = None) -> None:
    """Bring a deleted run back.

    Example: circuitlab store restore 3f2a9c
    """
    with open_store(store) as opened:
        opened.restore(run_id)
