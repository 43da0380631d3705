"""`circuitlab nodes`: scores of whole components, or of single features."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.cli_output import print_csv, print_json, print_table, say
from circuitlab.cli_recipe import Recipe
from circuitlab.errors import ArgumentError

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.node_table import NodeTable
    from circuitlab.prompts import Prompts

NODE_METHODS = ("eap", "eap-ig", "clean-corrupted")
NODE_COLUMNS = ("component", "neuron", "score", "stderr")


@opt.grouped
def nodes(
    model: opt.Model,
    *,
    neurons: Annotated[
        bool,
        typer.Option(
            "--neurons",
            help="Score every feature of what a component adds, not it all.",
        ),
    ] = False,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "logit_diff",
    method: Annotated[
        str, typer.Option(help="eap, eap-ig or clean-corrupted.")
    ] = "eap-ig",
    steps: opt.Steps = 5,
    rule: opt.Rule = "midpoint",
    ablation: opt.Ablation = "patch",
    drawing: opt.Drawing,
    loading: opt.Loading,
    ungroup_kv: opt.UngroupKv = False,
    batch_size: opt.BatchSize = None,
    top: Annotated[
        int, typer.Option("--top", help="How many components to show.")
    ] = 10,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Score every component of a model, and save the run.

    A score estimates how the metric changes when that component alone is corrupted: the
    sum of the scores of the edges that leave it.

    Example: circuitlab nodes embedded --task ioi --n 32
    """
    recipe = Recipe(
        model, task, file, metric=metric, method=method, steps=steps, rule=rule,
        ablation=ablation, ungroup_kv=ungroup_kv, **vars(drawing), **vars(loading),
    )  # fmt: skip
    check_method(recipe)
    loaded = recipe.load_model()
    prompts = recipe.prompts(loaded)
    table = score_nodes(recipe, loaded, prompts, neurons, batch_size)
    with open_store(store) as opened:
        saved = opened.save(table, prompts=prompts)
    print_nodes(table, saved, top, as_json, as_csv)


def check_method(recipe: Recipe) -> None:
    """Refuse unknown names, and methods that score edges alone, before the model loads."""
    method = recipe.method.replace("_", "-").lower()
    if method == "exact":
        raise ArgumentError(
            "method_unsupported",
            "exact effects are of edges alone (circuitlab score); for components choose "
            f"--method {', '.join(NODE_METHODS)}",
            value=recipe.method,
            expected=list(NODE_METHODS),
        )
    if method not in NODE_METHODS:
        raise ArgumentError(
            "method_unknown",
            f"there is no method {recipe.method!r}; choose {', '.join(NODE_METHODS)}",
            value=recipe.method,
            expected=list(NODE_METHODS),
        )
    recipe.check_names()


def score_nodes(
    recipe: Recipe,
    model: Backend,
    prompts: Prompts,
    neurons: bool,
    batch_size: int | None = None,
) -> NodeTable:
    """Score components as the recipe says; the run says so."""
    from circuitlab.node_table import NodeTable
    from circuitlab.nodes import node_scores
    from circuitlab.tables import Run, now, versions

    begun, clock = now(), time.perf_counter()
    method: Any = recipe.method_value()
    scores = node_scores(
        model, prompts, recipe.metric_value(), method=method, ablation=recipe.ablation,
        neurons=neurons, batch_size=batch_size,
    )  # fmt: skip
    run = Run(
        kind="act",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy=_policy(recipe, neurons),
        seed=prompts.seed,
        started_at=begun,
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )
    return NodeTable.of(scores, recipe.signed(run))


def _policy(recipe: Recipe, neurons: bool) -> dict[str, Any]:
    from circuitlab import ablations, methods

    return {
        **methods.describe(recipe.method_value()),
        "metric": recipe.metric_value().describe(),
        "ablation": ablations.describe(ablations.as_ablation(recipe.ablation)),
        "reduction": "sum_positions_mean_examples",
        "grain": "neuron" if neurons else "node",
        "frozen": None,
    }


def print_nodes(
    table: NodeTable, run_id: str, top: int, as_json: bool, as_csv: bool
) -> None:
    """Node scores: the strongest for people, all of them as CSV."""
    import numpy as np

    columns = NODE_COLUMNS if table.neurons else ("component", "score", "stderr")
    if as_csv:
        print_csv((*columns, "n"), table.rows.to_pylist())
        return
    order = np.argsort(-np.abs(table.scores), kind="stable")[: max(top, 0)]
    best = table.rows.select(columns).take(order).to_pylist()
    if as_json:
        print_json({"run_id": run_id, "n_rows": len(table), "top": best})
        return
    run = table.run
    what = "features" if table.neurons else "components"
    say(f"{len(table):,} {what} of {run.model.name}, {run.n} prompts of {run.dataset}")
    print_table(columns, best)
    say(f"run {run_id}")
