"""Commands on circuits: circuit, evaluate, curve."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import Bench, load_circuit, load_edges, open_store
from circuitlab.cli_output import (
    print_csv,
    print_json,
    print_table,
    progress,
    remark,
    say,
)
from circuitlab.errors import ArgumentError

if TYPE_CHECKING:
    from circuitlab.circuits import Circuit
    from circuitlab.evaluate import Curve, Evaluation
    from circuitlab.tables import EdgeTable, Run

EVAL_COLUMNS = (
    "circuit_id",
    "label",
    "rank",
    "k",
    "n_edges",
    "n",
    "faithfulness",
    "faithfulness_low",
    "faithfulness_high",
    "metric",
    "metric_full",
    "metric_ablated",
    "kl",
    "accuracy",
    "ablation",
    "prompts_overlap",
)


@opt.grouped
def circuit(
    run_id: opt.RunId,
    *,
    cut: opt.Cut,
    name: Annotated[str, typer.Option(help="A name for the circuit.")] = "",
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Choose edges of a scored run: a circuit.

    Saves it, and prints its edges and its id.
    Edges that lie on no path from the input to the logits are dropped (--no-prune
    keeps them), so a circuit can hold fewer edges than were asked for.

    Example: circuitlab circuit 3f2a9c --top-k 200
    """
    with open_store(store) as opened:
        edges = load_edges(opened, run_id)
        found = replace(choose(edges, cut), name=name)
        saved = opened.save(found)
    if not found and found.provenance.get("dangling"):
        remark("no edge chosen lies on a path to the logits; --no-prune keeps them")
    rows = [{"edge": edge, **_numbers(edges, edge)} for edge in found.ordered]
    if as_csv:
        print_csv(("edge", "score", "stderr"), rows)
    elif as_json:
        print_json(
            {**circuit_facts(found, saved), "scores_run": edges.run_id, "edges": rows}
        )
    else:
        print_table(("edge", "score", "stderr"), rows)
        say(describe(found))
        say(f"circuit {found.id}")
        say(f"run {saved}")


def _numbers(edges: EdgeTable, edge: str) -> dict[str, Any]:
    row = edges[edge]
    return {"score": row.score, "stderr": row.stderr}


def describe(circuit: Circuit) -> str:
    """How many edges and components a circuit keeps, of how many."""
    universe = circuit.shape.n_edges if circuit.shape else None
    share = f" of {universe:,} ({len(circuit) / universe:.1%})" if universe else ""
    asked = circuit.n_requested
    of_k = f"; {asked} were asked for" if asked not in (None, len(circuit)) else ""
    return f"{len(circuit):,} edges{share}, {len(circuit.nodes)} components{of_k}"


def circuit_facts(circuit: Circuit, saved: str) -> dict[str, Any]:
    """What identifies a circuit, as plain values."""
    return {
        "circuit_id": circuit.id,
        "run_id": saved,
        "name": circuit.name,
        "k": circuit.n_requested,
        "n_edges": len(circuit),
        "nodes": list(circuit.nodes),
        "selector": circuit.provenance.get("text"),
    }


def choose(edges: EdgeTable, cut: opt.Cut) -> Circuit:
    """The circuit that one cut takes; without a cut, all that `select` matches.

    Raises ArgumentError `selection_ambiguous`, and what the selector raises.
    """
    from circuitlab import circuits

    cuts = cut.given()
    if len(cuts) > 1 or not (cuts or cut.select):
        raise ArgumentError(
            "selection_ambiguous",
            "say what to keep with one of --top-k, --top-fraction, --threshold, --greedy, "
            f"--mass (or --select alone); {len(cuts)} were given",
            value=sorted(cuts),
        )
    name, value = next(iter(cuts.items()), ("top_fraction", 1.0))
    how: Any = {"where": cut.select, "rank": cut.rank, "prune": not cut.no_prune}
    return getattr(circuits, name)(edges, value, **how)


@opt.grouped
def evaluate(
    which: opt.CircuitOrRun,
    *,
    cut: opt.Cut,
    measuring: opt.Measuring,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Measure a circuit's faithfulness, and save it.

    Every edge outside the circuit is corrupted.

    Faithfulness is 1 where the circuit does all that the model does, and 0 where it
    does no more than the fully corrupted run. By default the prompts are ones that were
    not scored.

    Example: circuitlab evaluate 3f2a9c --top-k 200 --ablation patch
    """
    with open_store(store) as opened:
        found, run_id = load_circuit(opened, which)
        circuit = _circuit_of(found, cut)
        if circuit is not found:
            run_id = opened.save(circuit)
        bench = Bench.of(circuit.run, measuring)
        result = bench.evaluate(circuit, measuring.ablation, run_id)
        saved = opened.save(result, prompts=bench.prompts)
    print_evaluation(result, saved, as_json, as_csv)


def _circuit_of(found: Circuit | EdgeTable, cut: opt.Cut) -> Circuit:
    from circuitlab.circuits import Circuit

    if not isinstance(found, Circuit):
        return choose(found, cut)
    cuts = cut.given()
    if cuts or cut.select:
        raise ArgumentError(
            "selection_ambiguous",
            "this id is a circuit, whose edges are chosen already; leave --top-k and the "
            "like out, or give the run of scores",
            value=sorted(cuts),
        )
    return found


@opt.grouped
def curve(
    run_id: opt.RunId,
    *,
    sizes: Annotated[
        str | None,
        typer.Option(help="Numbers of edges, as 25,50,100; or mib, for CPR and CMD."),
    ] = None,
    rank: Annotated[
        Literal["magnitude", "support"], typer.Option(help="What best means.")
    ] = "magnitude",
    no_prune: opt.NoPrune = False,
    measuring: opt.Measuring,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Evaluate a run's circuits over sizes.

    Saves the curve.

    Example: circuitlab curve 3f2a9c --sizes 25,50,100,200
    """
    from circuitlab.evaluate import curve as evaluate_sizes

    wanted: Any = "mib" if sizes == "mib" else parse_sizes(sizes, ", or mib")
    with open_store(store) as opened:
        edges = load_edges(opened, run_id)
        bench = Bench.of(edges.run, measuring)
        with progress("Evaluating") as advance:
            found = evaluate_sizes(
                bench.model, bench.prompts, bench.recipe.metric_value(), edges,
                sizes=wanted, rank=rank, ablation=measuring.ablation, prune=not no_prune,
                scored=bench.scored, progress=advance,
            )  # fmt: skip
        saved = opened.save(found, prompts=bench.prompts)
    print_evaluation(found, saved, as_json, as_csv)
    if wanted == "mib" and not (as_json or as_csv):
        say(f"CPR {found.cpr:.4f} (by support), CMD {found.cmd:.4f} (by magnitude)")


def parse_sizes(text: str | None, also: str = "") -> list[int] | None:
    """Numbers of edges; `also` says what else could have been written. Raises ArgumentError `sizes_invalid`."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(
            "sizes_invalid",
            f"--sizes {text!r}: write numbers of edges with commas, as 25,50,100{also}",
            value=text,
        ) from None


def print_evaluation(
    found: Evaluation | Curve, run_id: str, as_json: bool, as_csv: bool
) -> None:
    """EVAL rows, of which model, metric and prompts they are, and where they were saved."""
    rows, run = found.rows.to_pylist(), found.run
    if as_csv:
        print_csv(EVAL_COLUMNS, rows)
    elif as_json:
        facts = {"run_id": run_id, **measured(run)}
        print_json({**facts, **rows[0]} if len(rows) == 1 else {**facts, "rows": rows})
    else:
        shown = [
            name for name in EVAL_COLUMNS if any(r[name] is not None for r in rows)
        ]
        shown = [
            name for name in shown if name not in ("circuit_id", "ablation", "label")
        ]
        say(heading(run))
        print_table(shown, rows)
        if len(rows) == 1:
            say(f"circuit {rows[0]['circuit_id']}")
        say(f"run {run_id}")


def measured(run: Run) -> dict[str, Any]:
    """What an evaluation was of, as plain values; `metric` is the name of a number."""
    policy = run.policy
    return {
        "model": run.model.name,
        "dataset": run.dataset,
        "metric_name": policy["metric"]["name"],
    }


def heading(run: Run) -> str:
    """The model, metric and prompts of an evaluation, as a line."""
    facts = measured(run)
    return (
        f"{facts['metric_name']} of {facts['model']} on {run.n} prompts of "
        f"{facts['dataset']}"
    )
