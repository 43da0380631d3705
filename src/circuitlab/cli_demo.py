"""`circuitlab demo`: the whole way once, on the embedded model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_circuit import describe
from circuitlab.cli_output import cell, print_json, print_table, progress, say
from circuitlab.cli_recipe import Recipe
from circuitlab.cli_score import best_edges, score_prompts

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.circuits import Circuit
    from circuitlab.evaluate import Evaluation
    from circuitlab.prompts import Prompts
    from circuitlab.tables import EdgeTable

ENOUGH = 0.9
"""The demo's circuit is the smallest of its sizes that is at least so faithful on the
prompts that were scored."""
RANDOM = 20


@dataclass(frozen=True)
class Found:
    """What the demo found, and under which ids the store has it."""

    model: Backend
    prompts: Prompts
    edges: EdgeTable
    circuit: Circuit
    evaluation: Evaluation
    random: tuple[float, ...]
    ids: dict[str, str]


def demo(
    task: Annotated[str, typer.Option(help="A task that the model does.")] = "ioi",
    model: Annotated[str, typer.Option(help="The model.")] = "embedded",
    n: Annotated[int, typer.Option("--n", help="Prompts to score.")] = 64,
    svg: Annotated[Path, typer.Option(help="Where to draw it.")] = Path("circuit.svg"),
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Find a circuit in the embedded model.

    That is the small model that circuitlab ships.
    Scores every edge on prompts of a task, keeps the fewest that still do the task,
    measures them on prompts that were not scored, beside random circuits of equal size,
    and draws what it found.

    Example: circuitlab demo
    """
    from circuitlab.draw import circuit_svg

    opened = open_store(store)
    found = _find(Recipe(model, task=task, n=n), opened)
    svg.write_text(circuit_svg(found.circuit, found.edges), encoding="utf-8")
    if as_json:
        print_json(_facts(found, svg, opened.path))
    else:
        _tell(found, svg, opened.path)


def _find(recipe: Recipe, store: Any) -> Found:
    model = recipe.load_model()
    prompts, held_out = recipe.prompts(model), recipe.held_out(model)
    edges, run_id = score_prompts(recipe, model, prompts, store)
    circuit = replace(_smallest(model, prompts, edges), name=f"demo_{recipe.task}")
    evaluation, random = _prove(model, held_out, prompts, circuit)
    with store:
        ids = {"scores": run_id, "circuit": store.save(circuit)}
        run = replace(evaluation.run, parent=ids["circuit"])
        evaluation = replace(evaluation, run=run)
        ids["evaluation"] = store.save(evaluation, prompts=held_out)
    return Found(model, prompts, edges, circuit, evaluation, random, ids)


def _smallest(model: Backend, prompts: Prompts, edges: EdgeTable) -> Circuit:
    """The smallest of a ladder of circuits that is faithful enough, chosen on the
    prompts that were scored: the held-out ones only judge it."""
    from circuitlab.evaluate import curve, ladder
    from circuitlab.metrics import logit_diff

    sizes = ladder(edges.shape.n_edges, 24)
    with progress("Trying sizes") as advance:
        tried = curve(
            model, prompts, logit_diff(), edges, sizes=sizes, rank="support",
            scored=prompts, samples=0, progress=advance,
        )  # fmt: skip
    reached = tried.rows["faithfulness"].to_pylist()
    good = [c for c, f in zip(tried.circuits, reached, strict=True) if f >= ENOUGH]
    return min(good or tried.circuits[-1:], key=len)


def _prove(
    model: Backend, held_out: Prompts, scored: Prompts, circuit: Circuit
) -> tuple[Evaluation, tuple[float, ...]]:
    """The circuit on held-out prompts, and random circuits of its size beside it."""
    from circuitlab.evaluate import evaluate, measure
    from circuitlab.metrics import logit_diff

    metric = logit_diff()
    found = evaluate(model, held_out, metric, circuit, scored=scored)
    others = measure(model, held_out, metric, _random_circuits(circuit))
    return found, tuple(others.faithfulness(row) for row in range(RANDOM))


def _random_circuits(circuit: Circuit) -> Sequence[Circuit]:
    import numpy as np

    from circuitlab.circuits import Circuit

    assert circuit.shape is not None
    names = np.array(circuit.shape.edge_names)
    rng = np.random.default_rng(0)
    drawn = [rng.choice(names, len(circuit), replace=False) for _ in range(RANDOM)]
    return [Circuit(frozenset(edges.tolist()), circuit.shape) for edges in drawn]


def _tell(found: Found, svg: Path, store: str) -> None:
    row = found.evaluation.rows.to_pylist()[0]
    example = found.prompts.table.slice(0, 1).to_pylist()[0]
    run, shape = found.edges.run, found.model.shape
    say(
        f"Task {found.prompts.name}, on {run.model.name}: {shape.n_layers} layers, "
        f"{shape.n_heads} heads, {shape.n_edges:,} edges"
    )
    say(f"  clean      {example['clean']!r} → {example['answer_texts'][0]!r}")
    say(f"  corrupted  {example['corrupted']!r}")
    say(f"\nScored on {run.n} prompts in {run.seconds:.1f} s; the strongest edges:")
    print_table(("edge", "score", "stderr"), best_edges(found.edges, 8))
    say("  (score: change of the logit difference when that edge alone is corrupted)")
    random = sum(found.random) / len(found.random)
    say(f"\nCircuit: {describe(found.circuit)}")
    low, high = row["faithfulness_low"], row["faithfulness_high"]
    bounds = f"  (95 % interval {cell(low)} to {cell(high)})"
    _number(f"faithfulness on {row['n']} other prompts", row["faithfulness"], bounds)
    _number(f"{RANDOM} random circuits of that size", random)
    full, ablated = cell(row["metric_full"]), cell(row["metric_ablated"])
    bounds = f"  (the whole model {full}, with every edge corrupted {ablated})"
    _number("logit difference", row["metric"], bounds)
    _tell_where(found, svg, store)


def _number(what: str, value: float, remark: str = "") -> None:
    say(f"  {what:<34}{value:>7.3f}{remark}")


def _tell_where(found: Found, svg: Path, store: str) -> None:
    say(f"\nStored in {store}")
    for what, run_id in found.ids.items():
        say(f"  {what:<11} {run_id}")
    say(f"Drawn in {svg}")
    program = "circuitlab" if shutil.which("circuitlab") else sys.argv[0]
    query = "select edge, score from v_edge order by abs(score) desc limit 5"
    say("\nLook at it:")
    say(f"  {program} app")
    say(f"  {program} runs")
    say(f'  {program} sql "{query}"')


def _facts(found: Found, svg: Path, store: str) -> dict[str, Any]:
    return {
        "run_id": found.ids["scores"],
        "circuit_run_id": found.ids["circuit"],
        "evaluation_run_id": found.ids["evaluation"],
        **found.evaluation.rows.to_pylist()[0],
        "random_faithfulness": list(found.random),
        "edges": list(found.circuit.ordered),
        "store": store,
        "svg": str(svg),
    }
