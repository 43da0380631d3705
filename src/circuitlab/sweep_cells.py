"""What one cell of a sweep does: find circuits by a method, evaluate them.

Each method is a function from the cell's work to the tables it made and the circuits it
found; evaluation is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import pyarrow as pa

from circuitlab.acdc import acdc_sweep
from circuitlab.backends import Backend
from circuitlab.circuits import Circuit, top_fraction, top_k
from circuitlab.edge_mask import Training, train_gates
from circuitlab.edges import EAP, EAPIG, CleanCorrupted, edge_scores
from circuitlab.errors import ArgumentError
from circuitlab.evaluate import Entry, EvalPlan
from circuitlab.exact import exact_effects
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.ranking import rank_edges
from circuitlab.tables import EdgeTable, Run


class Settings(Protocol):
    """The fields of a sweep that methods read."""

    @property
    def sizes(self) -> Sequence[float]: ...
    @property
    def thresholds(self) -> Sequence[float]: ...
    @property
    def sparsities(self) -> Sequence[float]: ...
    @property
    def ablation(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def fraction(self) -> float: ...
    @property
    def rank(self) -> str: ...


@dataclass(frozen=True)
class CellWork:
    """A cell, loaded: the model, the prompts to score and to evaluate, the settings."""

    model: Backend
    scored: Prompts
    held: Prompts
    metric: Metric
    acdc_metric: Metric
    settings: Settings
    seed: int
    checkpoint: str | None = None


@dataclass(frozen=True)
class Found:
    """Circuits with the setting each was found at, and the tables behind them.

    `left_out` are sizes that the model is too small for.
    """

    tables: Sequence[EdgeTable]
    circuits: Sequence[tuple[str, float, Circuit]]
    left_out: Sequence[float] = ()


@dataclass(frozen=True)
class Evaluated:
    """What a method found: things to save, the summary's rows, and what was left out."""

    things: Sequence[Any]
    rows: Sequence[dict[str, Any]]
    left_out: Sequence[float] = ()


@dataclass(frozen=True)
class CellEvaluation:
    """A cell's EVAL rows, with per-example numbers and the run."""

    rows: pa.Table
    per_example: pa.Table
    run: Run


def _cut(work: CellWork, table: EdgeTable) -> Found:
    """The circuits that a score table gives at every size that it has edges for."""
    rank: Any = work.settings.rank
    most = len(rank_edges(table, rank=rank).rows)
    fitting = [size for size in work.settings.sizes if size <= most]
    circuits = []
    for size in fitting:
        if size < 1:
            circuit = top_fraction(table, size, rank=rank)
        else:
            circuit = top_k(table, int(size), rank=rank)
        circuits.append(("size", float(size), circuit))
    left_out = [size for size in work.settings.sizes if size > most]
    return Found([table], circuits, left_out)


def _require_a_size(work: CellWork) -> None:
    """Before scoring: refuse a model that has fewer edges than every size."""
    sizes, most = work.settings.sizes, work.model.shape.n_edges
    if min(sizes) > most:
        raise ArgumentError(
            "size_out_of_range",
            f"the model has {most:,} edges, fewer than every size; give a smaller size, "
            "or a fraction",
            value=list(sizes),
            expected=most,
        )


def _scored(method: Callable[[CellWork], Any]) -> Callable[[CellWork], Found]:
    def find(work: CellWork) -> Found:
        _require_a_size(work)
        table = edge_scores(
            work.model,
            work.scored,
            work.metric,
            method=method(work),
            ablation=work.settings.ablation,
        )
        return _cut(work, table)

    return find


def _exact(work: CellWork) -> Found:
    _require_a_size(work)
    table = exact_effects(
        work.model,
        work.scored,
        work.metric,
        ablation=work.settings.ablation,
        checkpoint=work.checkpoint,
    )
    return _cut(work, table)


def _acdc(work: CellWork, start: Circuit | None = None) -> Found:
    results = acdc_sweep(
        work.model,
        work.scored,
        work.acdc_metric,
        work.settings.thresholds,
        start,
        ablation=work.settings.ablation,
        checkpoint=work.checkpoint,
    )
    return Found(
        [result.decisions for result in results],
        [("threshold", result.threshold, result.circuit) for result in results],
    )


def _hierarchical(work: CellWork) -> Found:
    table = edge_scores(
        work.model,
        work.scored,
        work.acdc_metric,
        method=EAPIG(work.settings.steps),
        ablation=work.settings.ablation,
    )
    start = top_fraction(table, work.settings.fraction, rank="magnitude")
    found = _acdc(work, start)
    return Found([table, *found.tables], found.circuits)


def _edge_mask(work: CellWork) -> Found:
    tables, circuits = [], []
    for sparsity in work.settings.sparsities:
        circuit, table = train_gates(
            work.model,
            work.scored,
            work.acdc_metric,
            training=Training(sparsity=sparsity, seed=work.seed),
            ablation=work.settings.ablation,
        )
        tables.append(table)
        circuits.append(("sparsity", float(sparsity), circuit))
    return Found(tables, circuits)


_FINDERS: Mapping[str, Callable[[CellWork], Found]] = {
    "eap": _scored(lambda work: EAP()),
    "eap_ig": _scored(lambda work: EAPIG(work.settings.steps)),
    "clean_corrupted": _scored(lambda work: CleanCorrupted()),
    "exact": _exact,
    "acdc": _acdc,
    "hierarchical_acdc": _hierarchical,
    "edge_mask": _edge_mask,
}

METHODS = tuple(_FINDERS)
"""The methods that a sweep can name."""


def find_circuits(method: str, work: CellWork) -> Evaluated:
    """Find a method's circuits and evaluate them on the held-out prompts.

    Raises ArgumentError `size_out_of_range`, and what the method and `evaluate` raise.
    """
    found = _FINDERS[method](work)
    if not found.circuits:
        return Evaluated(found.tables, [], found.left_out)
    entries = [
        Entry(circuit, "circuit", _rank(setting, work), _asked(circuit))
        for setting, _, circuit in found.circuits
    ]
    plan = EvalPlan(
        work.model,
        work.held,
        work.metric,
        work.settings.ablation,
        work.scored,
        seed=work.seed,
    )
    rows, per_example, run = plan.evaluate(entries)
    run = replace(run, parent=found.tables[0].run_id)
    evaluation = CellEvaluation(rows, per_example, run)
    kept = ("n_edges", "faithfulness", "faithfulness_low", "faithfulness_high")
    kept += ("metric", "kl", "accuracy", "circuit_id")
    lines = [
        {"setting": setting, "value": value, **{name: row[name] for name in kept}}
        for (setting, value, _), row in zip(
            found.circuits, rows.to_pylist(), strict=True
        )
    ]
    circuits = [circuit for _, _, circuit in found.circuits]
    return Evaluated([*found.tables, *circuits, evaluation], lines, found.left_out)


def _rank(setting: str, work: CellWork) -> str | None:
    return work.settings.rank if setting == "size" else None


def _asked(circuit: Circuit) -> int | None:
    return circuit.n_requested


def passes_of(method: str, settings: Settings, n_edges: int) -> float:
    """About how many forwards of the prompts a cell costs, at most.

    A backward to activations counts as two forwards with what is scored from it.
    """
    found_at = {"edge_mask": settings.sparsities, "acdc": settings.thresholds}
    found_at["hierarchical_acdc"] = settings.thresholds
    count = len(found_at.get(method, settings.sizes))
    integrated = 1 + 3 * settings.steps
    # From a receiver on, a pass is half a forward on the average.
    within = settings.fraction * n_edges / 2 * len(settings.thresholds)
    own = {
        "eap": 4,
        "eap_ig": integrated,
        "clean_corrupted": 7,
        "exact": n_edges / 2,
        "acdc": n_edges / 2 * len(settings.thresholds),
        "hierarchical_acdc": integrated + within,
        "edge_mask": 6 * Training().steps * len(settings.sparsities),
    }
    return own[method] + 2 * count + 2
