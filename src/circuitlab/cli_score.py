"""Commands that score edges: score, combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import load_edges, open_store, require_circuit
from circuitlab.cli_output import (
    print_csv,
    print_json,
    print_table,
    progress,
    remark,
    say,
)
from circuitlab.cli_recipe import KEY, Recipe
from circuitlab.errors import ArgumentError, StoreError

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
    circuit: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="With --method exact: patch this circuit's edges alone."
        ),
    ] = None,
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
    opened = open_store(store)
    only = _edges_of(opened, circuit, recipe) if circuit else None
    edges, run_id = score_and_save(recipe, opened, batch_size, only)
    print_edges(edges, run_id, store, top, as_json, as_csv)


def _edges_of(store: Store, circuit: str, recipe: Recipe) -> tuple[str, ...]:
    """A circuit's edges, to be patched for real. Raises `circuit_needs_exact`."""
    if recipe.method != "exact":
        raise ArgumentError(
            "circuit_needs_exact",
            f"{recipe.method} scores all edges at once; --circuit goes with --method exact",
            value=recipe.method,
            expected="exact",
        )
    return require_circuit(store, circuit, edges_only=True).ordered


def score_and_save(
    recipe: Recipe,
    store: Store,
    batch_size: int | None = None,
    only: Sequence[str] | None = None,
) -> tuple[EdgeTable, str]:
    """Run a recipe; save the run with its prompts; return the table and its id.

    `only` names the edges that the method `exact` patches."""
    recipe.check_names()
    model = recipe.load_model()
    return score_prompts(recipe, model, recipe.sets(model), store, batch_size, only)


def score_prompts(
    recipe: Recipe,
    model: Backend,
    prompts: Prompts | Sequence[Prompts],
    store: Store,
    batch_size: int | None = None,
    only: Sequence[str] | None = None,
) -> tuple[EdgeTable, str]:
    """Score these prompts (or sets of them, together) as the recipe says, and save."""
    from circuitlab.edges import edge_scores
    from circuitlab.methods import Exact
    from circuitlab.prompts import Prompts

    sets = [prompts] if isinstance(prompts, Prompts) else prompts
    count = sum(map(len, sets))
    with progress(f"Scoring {count} prompts") as advance, store:
        edges = edge_scores(
            model,
            sets if len(sets) > 1 else sets[0],
            recipe.metric_value(),
            method=recipe.method_value() if only is None else Exact(tuple(only)),
            ablation=recipe.ablation,
            batch_size=batch_size,
            progress=advance,
        )
        edges = replace(edges, run=recipe.signed(edges.run))
        for some in sets:
            store.save_prompts(some)
        return edges, store.save(edges)


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


def combine(
    run_ids: Annotated[
        list[str], typer.Argument(metavar="RUN_ID", help="Two runs of scores or more.")
    ],
    top: opt.Shown = 10,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Combine runs of edge scores on different prompts into one run.

    As if all their prompts had been scored together. The runs must agree in all but the
    prompts.

    Example: circuitlab combine 3f2a9c 8b01d7
    """
    with open_store(store) as opened:
        tables = [part for run_id in run_ids for part in _parts(opened, run_id)]
        if len(tables) < 2:
            raise ArgumentError(
                "combine_empty", "give two runs or more to combine", value=run_ids
            )
        edges, saved = combine_and_save(opened, tables)
        twice = _scored_twice(opened, tables)
    print_edges(edges, saved, store, top, as_json, as_csv)
    if twice:
        remark(f"{twice} prompts stand in more than one of these runs, and count again")


def combine_and_save(
    store: Store, tables: Sequence[EdgeTable]
) -> tuple[EdgeTable, str]:
    """Combine runs; save the run, which names its parts; return it and its id."""
    from circuitlab.combining import combine as put_together

    edges = put_together(tables)
    edges = replace(edges, run=_combined(edges.run, tables))
    return edges, store.save(edges)


def _parts(store: Store, run_id: str) -> list[EdgeTable]:
    """The run of that id; of one that was combined, the runs that it was made of."""
    edges = load_edges(store, run_id)
    made_of = edges.run.provenance.get("combined", [])
    return [load_edges(store, part) for part in made_of] or [edges]


def _combined(run: Run, tables: Sequence[EdgeTable]) -> Run:
    """The run with the ids of its parts, and the recipe of all of them if each has one."""
    told = {name: value for name, value in run.provenance.items() if name != KEY}
    told["combined"] = [table.run_id for table in tables]
    run = replace(run, provenance=told)
    if any(KEY not in table.run.provenance for table in tables):
        return run
    return Recipe.joined([Recipe.of(table.run) for table in tables]).signed(run)


def _scored_twice(store: Store, tables: Sequence[EdgeTable]) -> int:
    """How many of the tables' prompts were scored before by another; of those alone
    whose prompts the store has."""
    seen: set[Any] = set()
    twice = 0
    for table in tables:
        try:
            clean = set(store.load_prompts(table.run.dataset_digest).clean)
        except StoreError as error:
            if error.code != "prompts_unknown":
                raise
            continue
        twice += len(clean & seen)
        seen |= clean
    return twice
