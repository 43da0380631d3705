"""`circuitlab mask`: a circuit found by training a gate for every edge."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store, require_circuit
from circuitlab.cli_circuit import circuit_facts, describe
from circuitlab.cli_output import print_json, progress, say
from circuitlab.cli_recipe import Recipe
from circuitlab.errors import require_number

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.circuits import Circuit
    from circuitlab.edge_mask import Training
    from circuitlab.prompts import Prompts
    from circuitlab.store import Store
    from circuitlab.tables import EdgeTable


@opt.grouped
def mask(
    model: opt.Model,
    *,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "kl",
    ablation: opt.Ablation = "patch",
    start: opt.Start = None,
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    sparsity: Annotated[
        float,
        typer.Option(
            help="What it costs to keep every edge, in the metric's units: the larger, "
            "the fewer are kept."
        ),
    ] = 1.0,
    rate: Annotated[float, typer.Option(help="Adam's learning rate.")] = 0.1,
    first: Annotated[
        float,
        typer.Option(
            "--open",
            help="The chance that a gate is open at first, above 0 and below 1.",
        ),
    ] = 0.9,
    gate_seed: Annotated[int, typer.Option(min=0, help="Draws the gates.")] = 0,
    drawing: opt.Drawing,
    loading: opt.Loading,
    ungroup_kv: opt.UngroupKv = False,
    batch_size: Annotated[
        int | None,
        typer.Option(help="Prompts in a step, in turn; all of them by default."),
    ] = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Find a circuit by training a mask over the edges.

    Every edge gets a gate, trained by gradient descent; the circuit is the edges whose
    gates end open. Saves it, and the gates as a run of scores, of which `circuit` can
    choose others: their support is the chance that a gate is open.

    Example: circuitlab mask embedded --steps 60 --sparsity 2 --n 16
    """
    recipe = Recipe(
        model, task, file, method="edge-mask", metric=metric, ablation=ablation,
        ungroup_kv=ungroup_kv, **vars(drawing), **vars(loading),
    )  # fmt: skip
    recipe.check_names(method=False)
    training = _training(steps, sparsity, rate, first, gate_seed)
    with open_store(store) as opened:
        universe = require_circuit(opened, start, edges_only=True) if start else None
        loaded = recipe.load_model()
        prompts = recipe.prompts(loaded)
        found = train(recipe, loaded, prompts, training, universe, batch_size)
        facts = save_mask(opened, *found, prompts)
    if as_json:
        print_json({**facts, "edges": list(found[0].ordered)})
    else:
        say(describe(found[0]))
        say(f"circuit {facts['circuit_id']}")
        say(f"run {facts['run_id']}")
        say(f"gates {facts['gates_run']}")


def _training(
    steps: int, sparsity: float, rate: float, start: float, seed: int
) -> Training:
    from circuitlab.edge_mask import Training

    # The library's name for it is that of another option.
    require_number(
        "training_invalid",
        "--open",
        start,
        lambda chance: 0 < chance < 1,
        "a number above 0 and below 1",
    )
    return Training(steps, sparsity, rate, start, seed)


def train(
    recipe: Recipe,
    model: Backend,
    prompts: Prompts,
    training: Training,
    universe: Circuit | None,
    batch_size: int | None,
) -> tuple[Circuit, EdgeTable]:
    """Train gates as the recipe says; both results say so."""
    from circuitlab.edge_mask import train_gates

    with progress("Training gates") as advance:
        circuit, gates = train_gates(
            model, prompts, recipe.metric_value(), universe, training=training,
            ablation=recipe.ablation, batch_size=batch_size, progress=advance,
        )  # fmt: skip
    # Unlike a score, a gate depends on which prompts a step sees.
    run = recipe.signed(
        gates.run, **({} if batch_size is None else {"batch_size": batch_size})
    )
    return replace(circuit, run=run), replace(gates, run=run)


def save_mask(
    store: Store, circuit: Circuit, gates: EdgeTable, prompts: Prompts
) -> dict[str, Any]:
    """Save gates and circuit; what identifies them."""
    saved = store.save(gates, prompts=prompts)
    return {"gates_run": saved, **circuit_facts(circuit, store.save(circuit))}
