"""Edge scores: how much the metric changes, to first order, when one edge is corrupted.

    score(u→v) = Σ over positions and features of (ablated_u − clean_u) · ∂M/∂(input of v)

with the gradient at `v`'s pre-norm input (total derivative; nothing frozen), at the clean
run (EAP, Syed et al. 2023) or averaged over points (EAP-IG, Hanna et al. 2024). The rows
hold the mean over examples. It estimates M(edge corrupted) − M(clean): with
`logit_diff`, an edge that carries the behaviour has a *negative* score.

This stage takes a model, prompts and a metric, and gives EDGE rows. It does not choose
edges; see `circuits.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.backends import Backend, Capability, as_backend, require
from circuitlab.errors import ArgumentError
from circuitlab.methods import EAP, EAPIG, CleanCorrupted, Method, describe
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.score_sum import (
    Grain,
    ScoreSum,
    chunk_size,
    moments,
    sender_block,
)
from circuitlab.sites import parse_component
from circuitlab.tables import EdgeTable, Run, digest, edge_rows, now, versions

MEMORY_BUDGET = 2 << 30
"""Bytes that a chunk's sender differences and gradients may take, by default."""

Progress = Callable[[int, int], None]


class ScoringInterrupted(KeyboardInterrupt):
    """Scoring was interrupted; `partial` is the table of the examples that were done,
    or None. Combine it with the table of the rest: `combine([partial, rest])`."""

    def __init__(self, partial: EdgeTable | None):
        super().__init__("scoring was interrupted")
        self.partial = partial


def edge_scores(
    model: Any,
    prompts: Prompts | Iterable[Prompts],
    metric: Metric,
    *,
    method: Method | None = None,
    ablation: Ablation | str = "patch",
    grain: Grain = "site",
    receivers: Literal["qkv", "head"] = "qkv",
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: Progress | None = None,
) -> EdgeTable:
    """Score every edge of the model; return EDGE rows in canonical order.

    `score` is in the metric's units, mean over examples; `stderr` its standard error.
    `method` is EAP() unless given. `prompts` may be an iterable of sets, folded in as
    they come. `grain="position"` gives a row per edge and position, `"example"` per edge
    and example. `receivers="head"` gives a head's q, k and v edges their common sum, so
    that selections take them together. Chunks of examples (and of senders, where one
    example is too large) come from `memory_budget` in bytes, or `batch_size`; they
    change no score. `progress(done, total)` is called after each chunk.

    Raises ArgumentError `metric_stationary_at_clean` (EAP with KL), `ablation_unknown`,
    `metric_ignores_logits`, `batch_size_invalid`, `grain_unknown`, `capability_missing`;
    DataError `prompts_empty`, `prompt_lengths_differ` (patch), `metric_not_finite`,
    `score_not_finite`; and `ScoringInterrupted`, which keeps what was done.
    """
    model = as_backend(model)
    method = method or EAP()
    if method.name == "exact":
        return _exact(model, prompts, metric, method, ablation, progress)
    require(model, Capability.GRADIENTS)
    _check(metric, method, grain, receivers, batch_size)
    started, clock = now(), time.perf_counter()
    sets = [prompts] if isinstance(prompts, Prompts) else prompts
    sums = ScoreSum(model, grain, receivers == "head")
    done: list[tuple[Prompts, AblationSource, int]] = []
    try:
        for some in sets:
            source = AblationSource(model, some, as_ablation(ablation), metric)
            done.append((some, source, 0))
            _fold(sums, source, done, batch_size, memory_budget, method, progress)
    except KeyboardInterrupt:
        partial = None
        if sums.n:
            run = _run(model, metric, method, sums, done, started, clock)
            partial = EdgeTable(sums.rows(), run)
        raise ScoringInterrupted(partial) from None
    if not sums.n:
        raise ArgumentError("prompts_empty", "there are no prompts to score", value=0)
    run = _run(model, metric, method, sums, done, started, clock)
    return EdgeTable(sums.rows(), run)


def _fold(sums: ScoreSum, source, done, batch_size, budget, method, progress) -> None:
    """Score one prompt set chunk by chunk; `done` keeps how far it came."""
    prompts = source.prompts
    size = batch_size or chunk_size(sums.model, prompts, budget)
    sums.sender_block = sender_block(sums.model, prompts, budget)
    stages = method.stages(sums.model.shape)
    with sums.model.frozen():
        for rows in source.chunks(size):
            sums.add_chunk(rows, source, source.metric, stages)
            finished = min(rows.start + size, len(prompts))
            done[-1] = (prompts, source, finished)
            if progress:
                progress(finished, len(prompts))


def _exact(model, prompts, metric, method, ablation, progress) -> EdgeTable:
    from circuitlab.exact import exact_effects

    return exact_effects(
        model, prompts, metric, edges=method.edges, ablation=ablation, progress=progress
    )


def _check(metric: Metric, method, grain, receivers, batch_size) -> None:
    at_clean = method == EAP()
    if metric.stationary_at_clean and at_clean:
        raise ArgumentError(
            "metric_stationary_at_clean",
            f"the gradient of {metric.name} is zero at the clean run, so EAP would score "
            "every edge zero; use method=EAPIG(steps=5)",
            metric=metric.name,
            expected="EAPIG",
        )
    if grain not in ("site", "position", "example"):
        raise ArgumentError(
            "grain_unknown",
            f"{grain!r} is no grain; write site, position or example",
            value=grain,
        )
    if receivers not in ("qkv", "head"):
        raise ArgumentError(
            "receivers_unknown",
            f"receivers is 'qkv' or 'head', not {receivers!r}",
            value=receivers,
        )
    if batch_size is not None and (isinstance(batch_size, bool) or batch_size < 1):
        raise ArgumentError(
            "batch_size_invalid",
            f"batch_size is {batch_size}; give at least 1",
            value=batch_size,
            expected=">= 1",
        )


def _run(model: Backend, metric: Metric, method, sums: ScoreSum, done, started, clock):
    sets = [prompts[:n] for prompts, _, n in done if n]
    digests = [some.digest for some in sets]
    record = {**done[0][1].record}
    donors = record.pop("donors", None)
    provenance = sums.provenance()
    if donors is not None:
        provenance["donors"] = [
            d for _, source, _ in done for d in source.record["donors"]
        ]
    return Run(
        kind="edge",
        model=model.info,
        dataset=sets[0].name,
        dataset_digest=digests[0] if len(digests) == 1 else digest(*digests),
        n=sums.n,
        policy={
            **describe(method),
            "metric": metric.describe(),
            "ablation": record,
            "reduction": "sum_positions_mean_examples",
            "grain": sums.grain,
            "receivers": "head" if sums.by_head else "qkv",
            "frozen": None,
        },
        provenance=provenance,
        seed=sets[0].seed,
        started_at=started,
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )


def combine(tables: Sequence[EdgeTable]) -> EdgeTable:
    """Combine tables of disjoint prompts into one, as if scored together.

    Counts, means and sums of squares combine exactly (to rounding in float64). Raises
    ArgumentError `combine_empty`, and `combine_mismatch` where policy or model differ.
    """
    if not tables:
        raise ArgumentError("combine_empty", "there are no tables to combine", value=0)
    first = tables[0]
    for table in tables[1:]:
        _require_same(first, table)
    total = sum(_total(table) for table in tables)
    squares = sum(_squares(table) for table in tables)
    n = sum(table.run.n for table in tables)
    mean, stderr = moments(np.asarray(total), np.asarray(squares), n)
    status = np.array(first.rows["status"].to_pylist())
    rows = edge_rows(first.shape, mean, stderr, n, status)
    digests = [table.run.dataset_digest for table in tables]
    provenance = {**first.run.provenance, "sample_count": n, "shards": len(tables)}
    for name in ("completeness_error", "metric_clean", "metric_ablated"):
        values = [table.run.provenance.get(name) for table in tables]
        if all(value is not None for value in values):
            weighted = [v * t.run.n for v, t in zip(values, tables, strict=True)]
            provenance[name] = sum(weighted) / n
    run = replace(
        first.run,
        dataset_digest=digest(*digests) if len(tables) > 1 else digests[0],
        n=n,
        provenance=provenance,
        seconds=sum(table.run.seconds for table in tables),
    )
    return EdgeTable(rows, run)


def _require_same(first: EdgeTable, table: EdgeTable) -> None:
    same_policy = first.run.policy_digest == table.run.policy_digest
    same_model = first.run.model.identity() == table.run.model.identity()
    same_rows = first.rows.select(["edge", "status"]).equals(
        table.rows.select(["edge", "status"])
    )
    if same_policy and same_model and same_rows and first.run.policy["grain"] == "site":
        return
    what = "policy" if not same_policy else "model" if not same_model else "rows"
    raise ArgumentError(
        "combine_mismatch",
        f"the tables differ in their {what}: only tables of the same computation at grain "
        "site, on other prompts, can be combined",
        policies=[first.run.policy_digest, table.run.policy_digest],
        differs=what,
    )


def _total(table: EdgeTable) -> np.ndarray:
    return np.nan_to_num(table.scores) * table.run.n


def _squares(table: EdgeTable) -> np.ndarray:
    n = table.run.n
    mean = np.nan_to_num(table.scores)
    stderr = table.rows["stderr"].to_numpy(zero_copy_only=False).astype(np.float64)
    return np.nan_to_num(stderr) ** 2 * n * (n - 1) + n * mean**2


def scores_by_node(edges: EdgeTable) -> pa.Table:
    """Node scores of senders: Σ of the scores of the edges that leave them.

    That is Δ(sender) · ∂M/∂(sender's output), the node attribution patching score, in
    the metric's units. Returns columns component, kind, layer, head, score, in canonical
    order; a component whose edges are all unreachable has a null score.
    """
    frame = edges.rows.select(["sender", "score"]).group_by("sender", use_threads=False)
    found = frame.aggregate([("score", "sum")])
    scores = dict(
        zip(found["sender"].to_pylist(), found["score_sum"].to_pylist(), strict=True)
    )
    parts = [parse_component(name) for name in scores]
    parts.sort(key=lambda part: part.order)
    return pa.table(
        {
            "component": [part.name for part in parts],
            "kind": [part.kind for part in parts],
            "layer": pa.array([part.layer for part in parts], pa.int32()),
            "head": pa.array([part.head for part in parts], pa.int32()),
            "score": pa.array([scores[part.name] for part in parts], pa.float64()),
        }
    )


__all__ = [
    "EAP",
    "EAPIG",
    "CleanCorrupted",
    "ScoringInterrupted",
    "combine",
    "edge_scores",
    "scores_by_node",
]
