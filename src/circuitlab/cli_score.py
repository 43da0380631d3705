"""Commands that score edges: score, rerun."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from circuitlab import cli_options as opt
from circuitlab.cli_bench import load_edges, open_store
from circuitlab.cli_output import (
    print_csv,
    print_json,
    print_table,
    progress,
    remark,
    say,
)
from circuitlab.cli_recipe import KEY, Recipe

if TYPE_CHECKING:
    from circuitlab.backends import Backend
    from circuitlab.prompts import Prompts
    from circuitlab.store import Store
    from circuitlab.tables import EdgeTable, Run

EDGE_COLUMNS = ("edge", "score", "stderr", "n", "status")


@opt.grouped
def score(
    model: opt.Model,
    *,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "logit_diff",
    method: opt.Method = "eap-ig",
    steps: opt.Steps = 5,
    rule: opt.Rule = "midpoint",
    path: opt.Path_ = "inputs",
    ablation: opt.Ablation = "patch",
    drawing: opt.Drawing,
    loading: opt.Loading,
    ungroup_kv: opt.UngroupKv = False,
    batch_size: opt.BatchSize = None,
    top: opt.Shown = 10,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Score every edge of a model, and save the run.

    A score estimates how the metric changes when that edge alone is corrupted: with
    logit_diff an edge that carries the behaviour has a negative score.

    Example: circuitlab score embedded --task ioi --n 32
    """
    recipe = Recipe(
        model, task, file, metric=metric, method=method, steps=steps, rule=rule,
        path=path, ablation=ablation, ungroup_kv=ungroup_kv,
        **vars(drawing), **vars(loading),
    )  # fmt: skip
    edges, run_id = score_and_save(recipe, open_store(store), batch_size)
    print_edges(edges, run_id, store, top, as_json, as_csv)


def score_and_save(
    recipe: Recipe, store: Store, batch_size: int | None = None
) -> tuple[EdgeTable, str]:
    """Run a recipe; save the run with its prompts; return the table and its id."""
    recipe.check_names()
    model = recipe.load_model()
    return score_prompts(recipe, model, recipe.prompts(model), store, batch_size)


def score_prompts(
    recipe: Recipe,
    model: Backend,
    prompts: Prompts,
    store: Store,
    batch_size: int | None = None,
) -> tuple[EdgeTable, str]:
    """Score these prompts as the recipe says, and save."""
    from circuitlab.edges import edge_scores

    with progress(f"Scoring {len(prompts)} prompts") as advance, store:
        edges = edge_scores(
            model,
            prompts,
            recipe.metric_value(),
            method=recipe.method_value(),
            ablation=recipe.ablation,
            batch_size=batch_size,
            progress=advance,
        )
        told = {**edges.run.provenance, KEY: recipe.to_json()}
        edges = replace(edges, run=replace(edges.run, provenance=told))
        return edges, store.save(edges, prompts=prompts)


def print_edges(
    edges: EdgeTable, run_id: str, store: Any, top: int, as_json: bool, as_csv: bool
) -> None:
    """A run of edge scores: the best edges for people, all of them as CSV."""
    if as_csv:
        print_csv(edges.rows.column_names, edges.rows.to_pylist())
        return
    best = best_edges(edges, top)
    run = edges.run
    if as_json:
        print_json(
            {**_facts(run), "run_id": run_id, "n_edges": len(edges), "top": best}
        )
        return
    counts = (
        f"{len(edges):,} edges of {run.model.name}, {run.n} prompts of {run.dataset}"
    )
    say(f"{counts}, {run.policy['method']}, {run.seconds:.1f} s")
    print_table(("edge", "score", "stderr"), best)
    say(f"run {run_id}")
    if store is None:
        remark(f"next: circuitlab circuit {run_id[:12]} --top-k 200")


def best_edges(edges: EdgeTable, top: int) -> list[dict[str, Any]]:
    """The edges of largest |score|, largest first."""
    import numpy as np

    order = np.argsort(-np.nan_to_num(np.abs(edges.scores)), kind="stable")[
        : max(top, 0)
    ]
    return edges.rows.select(EDGE_COLUMNS).take(order).to_pylist()


def _facts(run: Run) -> dict[str, Any]:
    return {
        "kind": run.kind,
        "model": run.model.name,
        "dataset": run.dataset,
        "n": run.n,
        "policy": dict(run.policy),
        "params_digest": run.params_digest,
        "seconds": run.seconds,
        "provenance": dict(run.provenance),
    }


def rerun(
    run_id: opt.RunId,
    batch_size: opt.BatchSize = None,
    top: opt.Shown = 10,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Make a scored run again, and compare.

    The run says itself how it was made.
    Equal numbers give the same run id; others are kept beside it, under the same
    params_digest, and the largest difference is told.

    Example: circuitlab rerun 3f2a9c
    """
    opened = open_store(store)
    before = load_edges(opened, run_id)
    edges, saved = score_and_save(Recipe.of(before.run), opened, batch_size)
    print_edges(edges, saved, store, top, as_json, as_csv)
    remark(_compared(before, edges))


def _compared(before: EdgeTable, after: EdgeTable) -> str:
    import numpy as np

    if before.run.params_digest != after.run.params_digest:
        return "the model, the prompts or the method are not the same as before"
    if before.run_id == after.run_id:
        return "the same numbers, bit for bit"
    gap = np.nanmax(np.abs(before.scores - after.scores))
    size = np.nanmax(np.abs(before.scores))
    return f"the largest difference is {gap / size:.2g} of the largest |score|"
