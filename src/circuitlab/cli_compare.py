"""`circuitlab compare`: circuits and scores against a known circuit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import load_circuit, open_store, require_circuit
from circuitlab.cli_circuit import parse_sizes
from circuitlab.cli_output import print_csv, print_json, print_table, remark, say
from circuitlab.errors import ArgumentError

if TYPE_CHECKING:
    from circuitlab.circuits import Circuit
    from circuitlab.records import Record
    from circuitlab.roc import Roc
    from circuitlab.sites import ModelShape
    from circuitlab.store import Store
    from circuitlab.tables import EdgeTable

SHOWN = (
    "scores_run",
    "circuit_id",
    "subject",
    "n_edges",
    "n_both",
    "precision",
    "true_positive_rate",
    "false_positive_rate",
    "iou",
    "outside",
)
CURVE = ("scores_run", "auc", "n_known", "n_universe")


def compare(
    known: Annotated[
        str,
        typer.Argument(
            metavar="KNOWN",
            help="The circuit to find: an id, or a file (.json, .graphml, .dot, .csv).",
        ),
    ],
    ids: Annotated[
        list[str],
        typer.Argument(metavar="ID", help="Circuits, or runs of edge scores."),
    ],
    universe: Annotated[
        str | None,
        typer.Option(
            metavar="ID",
            help="Only this circuit's edges could have been found; by default all of "
            "the model's.",
        ),
    ] = None,
    sizes: Annotated[
        str | None,
        typer.Option(
            help="Of a run of scores: how many edges to take, as 25,50,100; by default "
            "as many as are known."
        ),
    ] = None,
    rank: opt.Rank = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Compare circuits with a known one (ROC).

    Tells for each circuit how many of the known edges it holds, and how many others. Of
    a run of scores, circuits of several sizes are compared, among the edges that it
    ranks. `auc` is the area under the curve through the circuits given, or of a run's
    whole ranking: 0.5 is chance.

    Example: circuitlab compare published.json 3f2a9c 8b01d7
    """
    wanted = parse_sizes(sizes)
    with open_store(store) as opened:
        found = [load_circuit(opened, any_id)[0] for any_id in ids]
        truth = _known(opened, known, found)
        among = require_circuit(opened, universe, edges_only=True) if universe else None
        _check(truth, among, [one.shape for one in found])
        curves = list(_curves(found, truth, among, wanted, rank))
        rows = [row for curve in curves for row in curve]
        saved = opened.save(_record(rows, found, truth, among))
    heads = [{name: curve[0][name] for name in CURVE} for curve in curves]
    if as_csv:
        print_csv((*SHOWN, *CURVE[1:]), rows)
    elif as_json:
        shown = [{name: row[name] for name in SHOWN} for row in rows]
        print_json({"run_id": saved, "known": truth.id, "curves": heads, "rows": shown})
    else:
        print_table([c for c in SHOWN if any(r[c] is not None for r in rows)], rows)
        for head in heads:
            area = "no AUC" if head["auc"] is None else f"AUC {head['auc']:.3f}"
            say(f"{area} of {_universe_text(head)}")
        say(f"run {saved}")
    for head in heads:
        if head["auc"] is None:
            remark(f"no AUC of {_universe_text(head)}: there is nothing to tell apart")


def _universe_text(head: dict[str, Any]) -> str:
    run = head["scores_run"]
    edges = f"{head['n_known']:,} known of {head['n_universe']:,} edges"
    return f"{run}, for {edges} that it ranks" if run else f"the circuits, for {edges}"


def _check(
    truth: Circuit, among: Circuit | None, shapes: Sequence[ModelShape | None]
) -> None:
    """Refuse what can't be compared: models of different shape, an empty universe, and
    nothing to find."""
    from circuitlab.circuits import shape_of_all

    shape = shape_of_all(truth, among, *shapes)
    if shape is None and among is None:
        raise ArgumentError(
            "universe_unknown",
            "none of these circuits says of which model it is, so nothing says which edges "
            "could have been found; give a circuit that holds them with --universe",
            value=None,
        )
    if among is not None and not among:
        raise ArgumentError(
            "universe_empty",
            "the circuit given with --universe has no edges, so nothing could have been "
            "found; give another, or leave --universe out",
            value=among.id,
        )
    if truth.edges.isdisjoint(truth.edges if among is None else among.edges):
        where = "" if among is None else " of the universe's edges"
        raise ArgumentError(
            "known_circuit_empty",
            f"the known circuit has none{where or ' edges'}, so there is nothing to find; "
            "give another KNOWN" + (", or another --universe" if where else ""),
            value=truth.id,
        )


def _known(store: Store, known: str, found: Sequence[Circuit | EdgeTable]) -> Circuit:
    """The known circuit, from a file or the store, with a shape if anything has one."""
    from circuitlab.interchange import ENDINGS, import_circuit

    shape = next((one.shape for one in found if one.shape), None)
    path = Path(known)
    if path.suffix.lower() in ENDINGS or path.is_file():
        truth = import_circuit(path, shape=shape).circuit
    else:
        truth = require_circuit(store, known, edges_only=True)
    return truth if truth.shape else replace(truth, shape=shape)


def _curves(
    found: Sequence[Circuit | EdgeTable],
    truth: Circuit,
    among: Circuit | None,
    sizes: Sequence[int] | None,
    rank: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Rows for the circuits together, and rows for each run of scores."""
    from circuitlab.circuits import Circuit
    from circuitlab.roc import compared

    circuits = [one for one in found if isinstance(one, Circuit)]
    if circuits:
        curve = compared(circuits, truth, universe=among)
        yield _rows(curve, circuits, {"scores_run": None, "auc": curve.auc})
    for edges in found:
        if not isinstance(edges, Circuit):
            yield _of_scores(edges, truth, among, sizes, rank)


def _of_scores(
    edges: EdgeTable,
    truth: Circuit,
    among: Circuit | None,
    sizes: Sequence[int] | None,
    rank: Any,
) -> list[dict[str, Any]]:
    """Rows for a run of scores. Its universe, of the area and the rates alike, is what it
    ranks: no other edge could be taken."""
    from circuitlab.circuits import Circuit, auroc, top_k
    from circuitlab.ranking import rank_edges
    from circuitlab.roc import compared

    ranked = rank_edges(edges, rank=rank)
    names = frozenset(ranked.names[row] for row in ranked.rows.tolist())
    could = Circuit(names if among is None else names & among.edges, edges.shape)
    if not could:
        raise ArgumentError(
            "universe_empty",
            f"run {edges.run_id} ranks none of the universe's edges; leave it out, or give "
            "another --universe",
            value=edges.run_id,
        )
    inside = _only(edges, could)
    known = len(truth.edges & could.edges)
    taken = [top_k(inside, k, rank=rank, prune=False) for k in sizes or [known]]
    curve = compared(taken, truth, universe=could)
    area = auroc(inside, truth, rank=rank) if 0 < known < len(could) else None
    return _rows(curve, taken, {"scores_run": edges.run_id, "auc": area})


def _only(edges: EdgeTable, among: Circuit) -> EdgeTable:
    """A table's rows of a circuit's edges."""
    keep = [name in among.edges for name in edges.rows["edge"].to_pylist()]
    return replace(edges, rows=edges.rows.filter(keep).combine_chunks())


def _rows(
    curve: Roc, circuits: Sequence[Circuit], facts: dict[str, Any]
) -> list[dict[str, Any]]:
    """A curve's points, each with what is true of the whole curve."""
    asked = {circuit.id: circuit.n_requested for circuit in circuits}
    rows = []
    for row in curve.rows.to_pylist():
        either = row["n_found"] + curve.n_known - row["n_both"]
        rows.append(
            {
                **row,
                **facts,
                "n_known": curve.n_known,
                "n_universe": curve.n_universe,
                "label": "compared",
                "subject": row["label"],
                "k": asked[row["circuit_id"]],
                "n_edges": row["n_found"],
                "iou": row["n_both"] / either if either else 1.0,
            }
        )
    return rows


def _record(
    rows: list[dict[str, Any]],
    found: Sequence[Circuit | EdgeTable],
    truth: Circuit,
    among: Circuit | None,
) -> Record:
    """The comparison as EVAL rows, which run no model: the model and the prompts are
    those of what was compared first."""
    import pyarrow as pa

    from circuitlab.records import Record
    from circuitlab.tables import EVAL, ModelInfo, Run, now, versions

    made = next((one.run for one in found if one.run), None)
    run = Run(
        kind="eval",
        model=made.model if made else ModelInfo("", "", "", "", "", truth.shape),
        dataset=made.dataset if made else "",
        dataset_digest=made.dataset_digest if made else "",
        n=made.n if made else 0,
        policy={
            "method": "compare",
            "known": truth.id,
            "universe": "all" if among is None else among.id,
        },
        started_at=now(),
        versions=versions(),
    )
    numbers = ("precision", "true_positive_rate", "false_positive_rate", "iou", "auc")
    more = [(name, pa.float64()) for name in numbers]
    more += [
        (name, pa.int64()) for name in ("n_both", "n_known", "n_universe", "outside")
    ]
    more += [(name, pa.string()) for name in ("subject", "scores_run")]
    table = pa.Table.from_pylist(rows, schema=pa.schema([*EVAL, *more]))
    return Record(run, {"eval": table})
