"""ACDC: remove every edge whose removal hardly worsens the metric (Conmy et al. 2023).

Receivers are visited from the logits back, in reverse canonical order, and a receiver's
senders latest first. An edge goes if M worsens by less than the threshold τ, compared
with M of the circuit as it then is; else it stays. A receiver whose component no kept
edge leaves is skipped, and its edges go untested; where heads act on each other within a
layer (`coupling`), only once nothing reads any of them.

The circuit is the plain sequential algorithm's, edge by edge; it costs less, because a
trial computes only what it changes (`circuit_state`), because a sender that is its own
ablated value is removed without a pass, and because the next edges are tried in the same
pass under the guess that this one goes. A wrong guess costs its rows and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.acdc_search import ORDER, Branch, Search, visit_order
from circuitlab.acdc_trials import Trials
from circuitlab.backends import Backend, as_backend
from circuitlab.checkpoint import Checkpoint
from circuitlab.circuit_state import prepare
from circuitlab.circuits import SCHEMA, Circuit, top_fraction
from circuitlab.edges import edge_scores
from circuitlab.errors import (
    ArgumentError,
    require_count,
    require_number,
    require_type,
)
from circuitlab.methods import EAPIG
from circuitlab.metrics import Metric, kl
from circuitlab.prompts import Prompts
from circuitlab.tables import EdgeTable, Run, digest, edge_rows, now, versions

SPECULATE = 8
"""How many edges one pass tries at most, by default."""

MEMORY_BUDGET = 1 << 30
"""Bytes that one chunk's sender differences may take, by default."""


@dataclass(frozen=True)
class AcdcResult:
    """What ACDC found at one threshold.

    `decisions` has a row for every edge of the model: `score` is how M changed when the
    edge was taken out of the circuit as it then was (in M's units; `stderr` is null);
    rows of edges that were not tested have status `unavailable`.
    """

    threshold: float
    circuit: Circuit
    decisions: EdgeTable


def acdc(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    threshold: float = 0.01,
    start: Circuit | None = None,
    *,
    ablation: Ablation | str = "patch",
    speculate: int = SPECULATE,
    batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Circuit:
    """Run ACDC; return the circuit, with its provenance.

    `metric` None is `kl()`; a task metric counts by its direction. `threshold` τ is in
    the metric's units. `start` restricts the universe of edges: all others are ablated
    throughout. `checkpoint` names a file that a killed run continues from. `speculate`
    changes no decision. `acdc_sweep` gives the decisions too, for several thresholds.

    Raises ArgumentError `threshold_invalid`, `speculate_out_of_range`,
    `batch_size_invalid`, `metric_invalid`, `start_invalid`, `edge_unknown`,
    `ablation_unknown`; DataError `prompt_lengths_differ`, `metric_not_finite`, and of
    the checkpoint `checkpoint_mismatch`, `checkpoint_corrupt`, `checkpoint_held` (another
    process is at work on it), `checkpoint_unusable`.

    Source: Conmy et al. 2023, algorithm 1.
    """
    found = acdc_sweep(
        model,
        prompts,
        metric,
        [threshold],
        start,
        ablation=ablation,
        speculate=speculate,
        batch_size=batch_size,
        checkpoint=checkpoint,
        progress=progress,
    )
    return found[0].circuit


def acdc_sweep(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    thresholds: Sequence[float] = (0.01,),
    start: Circuit | None = None,
    *,
    ablation: Ablation | str = "patch",
    speculate: int = SPECULATE,
    batch_size: int | None = None,
    checkpoint: str | Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[AcdcResult, ...]:
    """Run ACDC at several thresholds; return a result for each, in their order.

    Thresholds share their decisions until they first disagree. Everything else as in
    `acdc`. `progress(done, total)` counts the edges decided.
    """
    model = as_backend(model)
    metric = kl() if metric is None else metric
    thresholds = _checked(thresholds, speculate, start)
    begun, clock = now(), time.perf_counter()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    universe = model.shape.edge_mask if start is None else start.mask(model.shape)
    run = _run(model, prompts, metric, source, start)
    size = _chunk(model, prompts) if batch_size is None else batch_size
    size = require_count("batch_size_invalid", "batch_size", size)
    with _log(checkpoint, run, thresholds) as log:
        chunks = [prepare(model, rows, metric) for rows in source.chunks(size)]
        trials = Trials(model, chunks, metric)
        search = Search(
            model.shape, trials, metric.higher_is_better, speculate, log, progress
        )
        branches = {
            threshold: branch
            for branch in search.run(universe, tuple(sorted(set(thresholds))))
            for threshold in branch.thresholds
        }
    counts = replace(
        search.counts, components=trials.components, passes=trials.passes
    ).to_json()
    run = replace(
        run,
        provenance={**counts, "replayed": len(log.steps) if log else 0},
        started_at=begun,
        seconds=time.perf_counter() - clock,
    )
    return tuple(_result(t, branches[t], run, universe, start) for t in thresholds)


def hierarchical_acdc(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    threshold: float = 0.01,
    *,
    fraction: float = 0.1,
    scores: EdgeTable | None = None,
    ablation: Ablation | str = "patch",
    **options: Any,
) -> Circuit:
    """Run ACDC inside the `fraction` of the edges that score highest by magnitude.

    `scores` None computes EAP-IG (5 midpoint steps) with the same metric. What is cut
    by score is never tested, so the circuit may differ from full ACDC's: see
    docs/acdc.md for how much. `options` are `acdc`'s, without `start`. Raises as `acdc`
    and `top_fraction` do, and ArgumentError `universe_ambiguous`.
    """
    if "start" in options:
        raise ArgumentError(
            "universe_ambiguous",
            "the scores say among which edges hierarchical_acdc searches; give "
            "acdc(start=…) a circuit of your own",
            value="start",
        )
    model = as_backend(model)
    metric = kl() if metric is None else metric
    if scores is None:
        scores = edge_scores(model, prompts, metric, method=EAPIG(5), ablation=ablation)
    start = top_fraction(scores, fraction, rank="magnitude")
    found = acdc(model, prompts, metric, threshold, start, ablation=ablation, **options)
    facts = {"within": start.provenance, "fraction": fraction}
    return replace(found, provenance={**found.provenance, **facts})


def _checked(
    thresholds: Sequence[float], speculate: int, start: Circuit | None
) -> tuple[float, ...]:
    """The thresholds as numbers, once everything else is seen to be what it should be."""
    require_count("speculate_out_of_range", "speculate", speculate)
    remedy = "give a circuit, whose edges are the ones to search among"
    require_type("start_invalid", "start", start, Circuit | None, remedy)
    several = isinstance(thresholds, Iterable) and not isinstance(thresholds, str)
    given = tuple(thresholds) if several else ()
    if not given:
        raise ArgumentError(
            "threshold_invalid",
            f"thresholds is {thresholds!r}; give a list with at least one number",
            value=thresholds,
        )
    return tuple(
        require_number(
            "threshold_invalid",
            "the threshold",
            threshold,
            lambda t: bool(np.isfinite(t)) and t >= 0,
            "a finite number, zero or more, in the metric's units",
        )
        for threshold in given
    )


def _log(checkpoint: str | Path | None, run: Run, thresholds: Sequence[float]) -> Any:
    """The step log, for a `with`; None without a checkpoint."""
    if checkpoint is None:
        return nullcontext()
    head = {"schema": "circuitlab_acdc_v1", "params": run.params_digest}
    head |= {"thresholds": list(thresholds), "order": ORDER}
    return Checkpoint.opened(checkpoint, head, _is_step)


def _is_step(value: Any) -> bool:
    """The first step is the value of the whole universe; then there is one per edge."""
    if not isinstance(value, dict) or not isinstance(value.get("value"), float):
        return False
    edge = value.get("edge", [0, 0])
    whole = isinstance(edge, list) and all(type(index) is int for index in edge)
    return whole and len(edge) == 2 and set(value) <= {"edge", "value"}


def _chunk(model: Backend, prompts: Prompts) -> int:
    width = max(len(row) for row in prompts.clean) * model.shape.d_model
    one = (len(model.shape.senders) + 8 * SPECULATE) * width * model.dtype.itemsize
    return max(1, min(len(prompts), MEMORY_BUDGET // one))


def _run(
    model: Backend,
    prompts: Prompts,
    metric: Metric,
    source: AblationSource,
    start: Circuit | None,
) -> Run:
    return Run(
        kind="edge",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy={
            "method": "acdc",
            "method_options": {"order": ORDER},
            "metric": metric.describe(),
            "ablation": source.record,
            "reduction": "mean_examples",
            "grain": "site",
            "universe": "all" if start is None else start.id,
        },
        seed=prompts.seed,
        versions=versions(),
    )


def _result(
    threshold: float,
    branch: Branch,
    run: Run,
    universe: np.ndarray,
    start: Circuit | None,
) -> AcdcResult:
    shape = run.model.shape
    assert shape is not None
    options = {**run.policy["method_options"], "threshold": threshold}
    run = replace(run, policy={**run.policy, "method_options": options})
    senders, receivers = shape.edge_indices
    change = branch.change[senders, receivers]
    status = np.where(np.isnan(change), "unavailable", "ok").tolist()
    decisions = EdgeTable(edge_rows(shape, change, None, run.n, status), run)
    edges = frozenset(shape.names_of(branch.mask))
    outside = shape.n_edges - int(universe.sum())
    tested = status.count("ok")
    excluded = {"start": outside, "unread": shape.n_edges - outside - tested}
    provenance = {
        **_provenance(threshold, run, start),
        "run_id": decisions.run_id,
        "order_digest": digest(list(visit_order(shape))),
        "universe": int(universe.sum()),
        "rankable": tested,
        "excluded": {why: count for why, count in excluded.items() if count},
        "metric": branch.current,
        "selected": len(edges),
        "n": len(edges),
        "pruned": False,
    }
    return AcdcResult(threshold, Circuit(edges, shape, run, provenance), decisions)


def _provenance(threshold: float, run: Run, start: Circuit | None) -> Mapping[str, Any]:
    """What was asked for, with the words of a selection from scores.

    No counts of work: those differ where a run went on from its checkpoint, and this is
    part of the circuit's identity. They stand in the run's provenance.
    """
    return {
        "schema": SCHEMA,
        "selector": "acdc",
        "text": f"acdc(threshold={threshold:g})",
        "threshold": threshold,
        "policy_digest": run.policy_digest,
        "method": run.policy["method"],
        "reduction": run.policy["reduction"],
        "target": run.policy["metric"],
        "rank": ORDER,
        "where": None,
        "pins": [],
        "start": None if start is None else start.id,
    }
