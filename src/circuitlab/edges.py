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
from contextlib import contextmanager
from typing import Any, Literal

import torch

from circuitlab.ablations import Ablation, AblationSource, Mean, as_ablation
from circuitlab.backends import Backend, Capability, as_backend, require
from circuitlab.combining import combine, scores_by_node
from circuitlab.errors import ArgumentError, CircuitlabError, DataError, require_count
from circuitlab.methods import (
    EAP,
    EAPIG,
    CleanCorrupted,
    Exact,
    Method,
    check_method,
    describe,
)
from circuitlab.metrics import Metric, check_metric
from circuitlab.prompts import Prompts, check_prompts, joined_name
from circuitlab.score_sum import (
    Grain,
    ScoreSum,
    chunk_size,
    sender_block,
)
from circuitlab.tables import EdgeTable, Run, digest, now, versions

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
    change no score. `progress(done, total)` is called after each chunk. The caller's
    `no_grad` and `inference_mode` make no difference.

    Raises ArgumentError `metric_stationary_at_clean` (EAP with KL), `ablation_unknown`,
    `metric_ignores_logits`, `metric_invalid`, `method_unknown`, `prompts_invalid`,
    `batch_size_invalid`, `memory_budget_invalid`, `grain_unknown`, `capability_missing`,
    `mean_reference_needed` (a stream of sets has no mean of its own); DataError
    `prompts_empty`, `prompt_lengths_differ` (patch), `metric_not_finite`,
    `score_not_finite`; and `ScoringInterrupted`, which keeps what was done. Errors about
    one of several sets name it in the field `set`.
    """
    method = EAP() if method is None else method
    _check(metric, method, grain, receivers)
    ablation = as_ablation(ablation)
    model = as_backend(model)
    many = isinstance(prompts, Iterable) and not isinstance(prompts, str)
    sets: Any = prompts if many else [prompts]
    code = "memory_budget_invalid"
    memory_budget = require_count(code, "memory_budget", memory_budget)
    if isinstance(method, Exact):
        _check_exact(grain, receivers)
        how = (method, ablation, batch_size, memory_budget, progress)
        return combine([_exact(model, some, metric, *how) for some in sets])
    require(model, Capability.GRADIENTS)
    if _corrects(method):
        require(model, Capability.ATTENTION_PATTERN, Capability.RESUME)
    started, clock = now(), time.perf_counter()
    sums = ScoreSum(model, grain, receivers == "head")
    sources: list[AblationSource] = []
    try:
        for number, some in enumerate(sets):
            _check_set(some, number, ablation)
            with _differentiable(), _naming_the_set(prompts, number):
                sources.append(AblationSource(model, some, ablation, metric))
                _fold(sums, sources[-1], batch_size, memory_budget, method, progress)
    except KeyboardInterrupt:
        partial = None
        if sums.n:
            run = _run(model, metric, method, sums, sources, started, clock)
            partial = EdgeTable(sums.rows(), run)
        raise ScoringInterrupted(partial) from None
    if not sums.n:
        raise DataError("prompts_empty", "there are no prompts to score", value=0)
    run = _run(model, metric, method, sums, sources, started, clock)
    return EdgeTable(sums.rows(), run)


def _corrects(method: Method) -> bool:
    return isinstance(method, EAP) and method.qk_correction


def _fold(sums: ScoreSum, source, batch_size, budget, method, progress) -> None:
    """Score one prompt set chunk by chunk."""
    prompts = source.prompts
    size = batch_size
    if size is None:
        size = chunk_size(sums.model, prompts, budget, sums.grain)
    sums.sender_block = sender_block(sums.model, prompts, budget)
    stages = method.stages(sums.model.shape)
    with sums.model.frozen():
        for rows in source.chunks(size):
            sums.add_chunk(
                rows, source, source.metric, stages, qk_correction=_corrects(method)
            )
            if progress:
                progress(min(rows.start + size, len(prompts)), len(prompts))


def _exact(
    model, prompts, metric, method, ablation, batch_size, budget, progress
) -> EdgeTable:
    from circuitlab.exact import exact_effects

    return exact_effects(
        model,
        prompts,
        metric,
        edges=method.edges,
        ablation=ablation,
        batch_size=batch_size,
        memory_budget=budget,
        progress=progress,
    )


@contextmanager
def _differentiable():
    """Gradients work inside, whatever mode the caller is in."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


@contextmanager
def _naming_the_set(prompts: object, number: int):
    """Errors that name an example name its set too, where there are several."""
    try:
        yield
    except CircuitlabError as error:
        if not isinstance(prompts, Prompts):
            error.fields["set"] = number
        raise


def _check_set(some: object, number: int, ablation: Ablation) -> None:
    check_prompts(some)
    if number and isinstance(ablation, Mean) and ablation.reference is None:
        raise ArgumentError(
            "mean_reference_needed",
            "the mean over a set's own prompts differs from set to set; for a stream give "
            "Mean(reference=prompts), whose clean prompts are averaged",
            value=None,
            expected="Mean(reference=...)",
        )


def _check_exact(grain: str, receivers: str) -> None:
    if grain != "site" or receivers != "qkv":
        raise ArgumentError(
            "exact_option_unsupported",
            "exact effects are of whole edges into one port: leave grain='site' and "
            "receivers='qkv'",
            grain=grain,
            receivers=receivers,
        )


def _check(metric: Metric, method, grain: str, receivers: str) -> None:
    check_metric(metric)
    check_method(method, metric)
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


def _scored(sources: Sequence[AblationSource], n: int) -> list[Prompts]:
    """The first `n` prompts of a stream of sets."""
    found: list[Prompts] = []
    for source in sources:
        if n > 0:
            found.append(source.prompts[:n])
        n -= len(source.prompts)
    return found


def _run(
    model: Backend, metric: Metric, method, sums: ScoreSum, sources, started, clock
) -> Run:
    sets = _scored(sources, sums.n)
    digests = [some.digest for some in sets]
    record = {**sources[0].record}
    donors = record.pop("donors", None)
    provenance = sums.provenance()
    if donors is not None:
        drawn = [donor for source in sources for donor in source.record["donors"]]
        provenance["donors"] = drawn[: sums.n]
    return Run(
        kind="edge",
        model=model.info,
        dataset=joined_name(some.name for some in sets),
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
        seed=sets[0].seed if len({some.seed for some in sets}) == 1 else None,
        started_at=started,
        seconds=time.perf_counter() - clock,
        versions=versions(),
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
