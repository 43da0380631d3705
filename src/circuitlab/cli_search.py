"""Commands that check and search: acdc, validate, calibrate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import Bench, load_edges, open_store, require_circuit
from circuitlab.cli_circuit import circuit_facts, describe, heading, measured
from circuitlab.cli_output import (
    print_csv,
    print_json,
    print_table,
    progress,
    remark,
    say,
    show,
)
from circuitlab.cli_recipe import Recipe
from circuitlab.cli_score import score_prompts
from circuitlab.errors import ArgumentError

if TYPE_CHECKING:
    from circuitlab.acdc import AcdcResult
    from circuitlab.backends import Backend
    from circuitlab.circuits import Circuit
    from circuitlab.prompts import Prompts
    from circuitlab.store import Store

VALIDATION_COLUMNS = (
    "label",
    "subject",
    "n_edges",
    "faithfulness",
    "change",
    "change_low",
    "change_high",
)
AGREEMENT_COLUMNS = ("statistic", "stratum", "value", "low", "high")


@opt.grouped
def acdc(
    model: opt.Model,
    *,
    threshold: Annotated[
        list[float] | None,
        typer.Option(
            help="How much worse the metric may get by an edge's removal, in its units; "
            "0.01 by default. Give several times: the searches share their work."
        ),
    ] = None,
    task: opt.Task = None,
    file: opt.File = None,
    metric: opt.Metric = "kl",
    ablation: opt.Ablation = "patch",
    start: opt.Start = None,
    fraction: Annotated[
        float | None,
        typer.Option(
            help="Search only among this share of all edges, as 0.1: those that EAP-IG "
            "scores highest, which are saved as a run and a circuit of their own."
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="A file that an interrupted search continues from."),
    ] = None,
    drawing: opt.Drawing,
    loading: opt.Loading,
    ungroup_kv: opt.UngroupKv = False,
    batch_size: opt.BatchSize = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
) -> None:
    """Search a circuit by taking edges out (ACDC).

    From the logits back, an edge goes if the metric hardly gets worse without it. Saves
    the decisions and the circuit, one of each for every threshold.

    Example: circuitlab acdc embedded --threshold 0.05 --n 16
    """
    recipe = Recipe(
        model, task, file, method="acdc", metric=metric, ablation=ablation, ungroup_kv=ungroup_kv,
        **vars(drawing), **vars(loading),
    )  # fmt: skip
    recipe.check_names(method=False)
    _check_universe(start, fraction)
    with open_store(store) as opened:
        universe = require_circuit(opened, start, edges_only=True) if start else None
        loaded = recipe.load_model()
        prompts = recipe.prompts(loaded)
        within: dict[str, Any] = {}
        if fraction is not None:
            universe, within = _best_share(opened, recipe, loaded, prompts, fraction)
        found = search(
            recipe,
            loaded,
            prompts,
            threshold or [0.01],
            universe,
            batch_size,
            checkpoint,
        )
        facts = [
            {"threshold": one.threshold, **save_search(opened, one, prompts, within)}
            for one in found
        ]
    if as_json:
        print_json(facts)
    else:
        print_table(("threshold", "n_edges", "circuit_id", "run_id"), facts)


def _check_universe(start: str | None, fraction: float | None) -> None:
    from circuitlab.ranking import check_fraction

    if fraction is None:
        return
    check_fraction(fraction)
    if start:
        raise ArgumentError(
            "universe_ambiguous",
            "give --start or --fraction, not both: each says which edges to search",
            value=[start, fraction],
        )


def _best_share(
    store: Store, recipe: Recipe, model: Backend, prompts: Prompts, fraction: float
) -> tuple[Circuit, dict[str, Any]]:
    """The edges that EAP-IG scores highest on the search's prompts, saved as a run and
    a circuit; and what the search is to say of them. As `hierarchical_acdc` does."""
    from circuitlab.circuits import top_fraction

    scoring = replace(recipe, method="eap-ig")
    edges, _ = score_prompts(scoring, model, prompts, store)
    universe = top_fraction(edges, fraction, rank="magnitude")
    store.save(universe)
    return universe, {"within": dict(universe.provenance), "fraction": fraction}


def search(
    recipe: Recipe,
    model: Backend,
    prompts: Prompts,
    thresholds: Sequence[float],
    universe: Circuit | None,
    batch_size: int | None = None,
    checkpoint: Path | None = None,
) -> list[AcdcResult]:
    """Run ACDC as the recipe says, at each threshold; the decisions say so."""
    from circuitlab.acdc import acdc_sweep

    with progress("Deciding edges") as advance:
        found = acdc_sweep(
            model, prompts, recipe.metric_value(), thresholds, universe,
            ablation=recipe.ablation, batch_size=batch_size, checkpoint=checkpoint,
            progress=advance,
        )  # fmt: skip
    return [_signed(one, recipe) for one in found]


def _signed(found: AcdcResult, recipe: Recipe) -> AcdcResult:
    run = recipe.signed(found.decisions.run)
    return replace(
        found,
        decisions=replace(found.decisions, run=run),
        circuit=replace(found.circuit, run=run),
    )


def save_search(
    store: Store, found: AcdcResult, prompts: Prompts, within: Mapping[str, Any]
) -> dict[str, Any]:
    """Save one threshold's decisions and circuit, which also say `within` which edges
    was searched; what identifies them."""
    run = found.decisions.run
    run = replace(run, provenance={**run.provenance, **within})
    decided = store.save(replace(found.decisions, run=run), prompts=prompts)
    provenance = {**found.circuit.provenance, **within}
    circuit = replace(found.circuit, run=run, provenance=provenance)
    facts = circuit_facts(circuit, store.save(circuit))
    more = {"scores_run": within["within"]["run_id"]} if within else {}
    return {"decisions_run": decided, **more, **facts}


@opt.grouped
def validate(
    circuit_id: Annotated[
        str,
        typer.Argument(metavar="CIRCUIT_ID", help="A circuit's id, or its beginning."),
    ],
    *,
    minimality: Annotated[
        str,
        typer.Option(
            help="Take out edges or components, one after the other; or none."
        ),
    ] = "components",
    knockouts: Annotated[
        int, typer.Option(min=0, help="Random sets to knock out of circuit and model.")
    ] = 10,
    random: Annotated[
        int,
        typer.Option(min=0, help="Random circuits of the same size to compare with."),
    ] = 10,
    measuring: opt.Measuring,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Is a circuit complete, minimal, better than chance?

    Measures the circuit, its complement, random circuits of its size, and the circuit
    without each of its parts; saves all of it. `change` is how much faithfulness the
    circuit has over a row.

    Example: circuitlab validate 3f2a9c
    """
    from circuitlab.validate import validate as prove

    by: Any = None if minimality == "none" else minimality
    with open_store(store) as opened:
        circuit = require_circuit(opened, circuit_id)
        bench = Bench.of(circuit.run, measuring)
        with progress("Validating") as advance:
            found = prove(
                bench.model, bench.prompts, bench.recipe.metric_value(), circuit,
                ablation=measuring.ablation, minimality=by, knockouts=knockouts, random=random,
                scored=bench.scored, progress=advance,
            )  # fmt: skip
        saved = opened.save(found, prompts=bench.prompts)
    rows = found.rows.to_pylist()
    if as_csv:
        print_csv(found.rows.column_names, rows)
    elif as_json:
        print_json({"run_id": saved, **measured(found.run), "rows": rows})
    else:
        say(heading(found.run))
        print_table(VALIDATION_COLUMNS, rows, describe(circuit))
        say(f"run {saved}")


def calibrate(
    run_id: opt.RunId,
    best: Annotated[
        int,
        typer.Option("--best", min=0, help="How many of the strongest edges to patch."),
    ] = 50,
    random: Annotated[
        int, typer.Option(min=0, help="How many of the others, drawn.")
    ] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Draws the others.")] = 0,
    model: opt.Where = None,
    store: opt.Store = None,
    as_json: opt.Json = False,
    as_csv: opt.Csv = False,
) -> None:
    """Do the scores agree with the exact effects?

    Patches the strongest edges and some others one by one, on the prompts that were
    scored, and saves how well their scores agree with what really happens.

    Example: circuitlab calibrate 3f2a9c --best 30 --random 30
    """
    from circuitlab.calibrate import calibrate as compare

    with open_store(store) as opened:
        edges = load_edges(opened, run_id)
        bench = Bench.of(edges.run, opt.Measuring(on="scored", model=model))
        with progress("Patching edges") as advance:
            found = compare(
                bench.model, bench.prompts, bench.recipe.metric_value(), edges,
                top=best, random=random, seed=seed, progress=advance,
            )  # fmt: skip
        assert found.exact is not None
        opened.save(found.exact, prompts=bench.prompts)
        saved = opened.save(found)
    rows = [row for row in found.rows.to_pylist() if row.get("value") is not None]
    if as_json:
        print_json({"run_id": saved, "exact_run": found.exact.run_id, "rows": rows})
    else:
        show(AGREEMENT_COLUMNS, rows, as_csv=as_csv)
        remark(f"run {saved}; the exact effects: {found.exact.run_id}")
