"""`circuitlab rerun`: a stored run, made again from its own recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from circuitlab import cli_options as opt
from circuitlab.cli_bench import load_edges, open_store, require_circuit
from circuitlab.cli_mask import save_mask, train
from circuitlab.cli_nodes import print_nodes, score_nodes
from circuitlab.cli_output import remark
from circuitlab.cli_recipe import KEY, Recipe
from circuitlab.cli_score import (
    combine_and_save,
    print_edges,
    score_and_save,
    score_prompts,
)
from circuitlab.cli_search import save_search, search
from circuitlab.errors import ArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from circuitlab.node_table import NodeTable
    from circuitlab.store import Store
    from circuitlab.tables import EdgeTable, Run


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
    from circuitlab.node_table import NodeTable

    opened = open_store(store)
    before = opened.load(run_id)
    after: NodeTable | EdgeTable
    if isinstance(before, NodeTable):
        after, saved = _nodes(opened, before, batch_size)
        print_nodes(after, saved, top, as_json, as_csv)
    else:
        before = load_edges(opened, run_id)
        after, saved = _edges(opened, before, batch_size)
        print_edges(after, saved, store, top, as_json, as_csv)
    remark(_compared(before, after))


def _nodes(
    store: Store, before: NodeTable, batch_size: int | None
) -> tuple[NodeTable, str]:
    recipe = Recipe.of(before.run)
    model = recipe.load_model()
    prompts = recipe.prompts(model)
    table = score_nodes(recipe, model, prompts, before.neurons, batch_size)
    with store:
        return table, store.save(table, prompts=prompts)


def _edges(
    store: Store, before: EdgeTable, batch_size: int | None
) -> tuple[EdgeTable, str]:
    """Scores, ACDC's decisions or trained gates, whichever the run holds."""
    recipe, policy = Recipe.of(before.run), before.run.policy
    only = None
    match policy["method"]:
        case "acdc":
            return _decisions(store, before.run, recipe, batch_size)
        case "edge_mask":
            return _gates(store, before.run, recipe, batch_size)
        case "exact":
            edges = before.rows["edge"].to_pylist()
            only = edges if len(edges) < before.shape.n_edges else None
    if "combined" in before.run.provenance:
        return _combined(store, recipe, batch_size, only)
    return score_and_save(recipe, store, batch_size, only)


def _combined(
    store: Store, recipe: Recipe, batch_size: int | None, only: Sequence[str] | None
) -> tuple[EdgeTable, str]:
    """The parts, each scored again for itself, and combined as they were."""
    model = recipe.load_model()
    parts = [
        score_prompts(part, model, part.prompts(model), store, batch_size, only)[0]
        for part in recipe.each()
    ]
    with store:
        return combine_and_save(store, parts)


def _decisions(
    store: Store, run: Run, recipe: Recipe, batch_size: int | None
) -> tuple[EdgeTable, str]:
    universe = _universe(store, run)
    within = {
        k: run.provenance[k] for k in ("within", "fraction") if k in run.provenance
    }
    threshold = run.policy["method_options"]["threshold"]
    model = recipe.load_model()
    prompts = recipe.prompts(model)
    (found,) = search(recipe, model, prompts, [threshold], universe, batch_size)
    with store:
        facts = save_search(store, found, prompts, within)
    return found.decisions, facts["decisions_run"]


def _gates(
    store: Store, run: Run, recipe: Recipe, batch_size: int | None
) -> tuple[EdgeTable, str]:
    from circuitlab.edge_mask import Training

    size = run.provenance[KEY].get("batch_size")
    if batch_size not in (None, size):
        was = "all prompts" if size is None else f"{size} prompts"
        raise ArgumentError(
            "batch_size_invalid",
            f"--batch-size {batch_size}: the gates were trained on {was} a step, and others "
            "would make other gates; leave it out, or train anew with `circuitlab mask`",
            value=batch_size,
            expected=size,
        )
    universe = _universe(store, run)
    training = Training(**run.policy["method_options"])
    model = recipe.load_model()
    prompts = recipe.prompts(model)
    circuit, gates = train(recipe, model, prompts, training, universe, size)
    with store:
        return gates, save_mask(store, circuit, gates, prompts)["gates_run"]


def _universe(store: Store, run: Run) -> Any:
    """The circuit inside which a search was made; None where it was the whole model."""
    named = run.policy["universe"]
    if named == "all":
        return None
    try:
        return require_circuit(store, named, edges_only=True)
    except StoreError as error:
        if error.code != "run_unknown":
            raise
        raise StoreError(
            "universe_missing",
            f"this run looked only among the edges of circuit {named}, which is not in "
            f"{store.path}; where the run was made, write `circuitlab export FOLDER "
            f"{named}`, and here `circuitlab import FOLDER`",
            value=named,
            path=store.path,
        ) from None


def _compared(before: EdgeTable | NodeTable, after: EdgeTable | NodeTable) -> str:
    import numpy as np

    if before.run.params_digest != after.run.params_digest:
        return "the model, the prompts or the method are not the same as before"
    if before.run_id == after.run_id:
        return "the same numbers, bit for bit"
    gap = np.nanmax(np.abs(before.scores - after.scores))
    size = np.nanmax(np.abs(before.scores))
    return f"the largest difference is {gap / size:.2g} of the largest |score|"
