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
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import (
    Ablation,
    AblationSource,
    Patch,
    Rows,
    as_ablation,
)
from circuitlab.backends import Backend, Capability, TokenBatch, as_backend, require
from circuitlab.errors import ArgumentError, DataError
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.receivers import GradientSum, Group, leaf_tap
from circuitlab.senders import Collector, SenderValues, collect, expand
from circuitlab.tables import EdgeTable, Run, edge_rows, now, versions

MEMORY_BUDGET = 2 << 30
"""Bytes that a chunk's sender differences and gradients may take, by default."""

Rule = Literal["midpoint", "left", "right", "trapezoid", "gauss_legendre"]


@dataclass(frozen=True)
class EAP:
    """Edge attribution patching: the gradient at the clean run (Syed et al. 2023)."""

    name = "eap"

    def points(self) -> list[tuple[float, float]]:
        """(α, weight) pairs; α = 1 is the clean run, 0 the ablated input."""
        return [(1.0, 1.0)]


@dataclass(frozen=True)
class CleanCorrupted:
    """The gradients of both ends, averaged."""

    name = "clean_corrupted"

    def points(self) -> list[tuple[float, float]]:
        return [(1.0, 0.5), (0.0, 0.5)]


@dataclass(frozen=True)
class EAPIG:
    """EAP with integrated gradients over the `input` component (Hanna et al. 2024).

    Points are `ablated + α(clean − ablated)`; the sender differences stay the end
    points'. `rule="left"` with 5 steps is what EAP-IG's own code does.
    """

    steps: int = 5
    rule: Rule = "midpoint"
    name = "eap_ig"

    def __post_init__(self):
        rules = ("midpoint", "left", "right", "trapezoid", "gauss_legendre")
        if self.rule not in rules:
            raise ArgumentError(
                "ig_rule_unknown",
                f"{self.rule!r} is no rule; write one of {', '.join(rules)}",
                value=self.rule,
                expected=rules,
            )
        least = 2 if self.rule == "trapezoid" else 1
        if isinstance(self.steps, bool) or self.steps < least:
            raise ArgumentError(
                "ig_steps_out_of_range",
                f"steps is {self.steps}; {self.rule} needs at least {least}",
                value=self.steps,
                expected=f">= {least}",
            )

    def points(self) -> list[tuple[float, float]]:
        steps = self.steps
        even = [1 / steps] * steps
        match self.rule:
            case "left":
                alphas = [k / steps for k in range(steps)]
            case "right":
                alphas = [(k + 1) / steps for k in range(steps)]
            case "midpoint":
                alphas = [(k + 0.5) / steps for k in range(steps)]
            case "trapezoid":
                alphas = np.linspace(0, 1, steps).tolist()
                even = [1 / (steps - 1)] * steps
                even[0] = even[-1] = even[0] / 2
            case _:
                nodes, weights = np.polynomial.legendre.leggauss(steps)
                alphas, even = ((nodes + 1) / 2).tolist(), (weights / 2).tolist()
        return list(zip(alphas, even, strict=True))


Method = EAP | EAPIG | CleanCorrupted


def edge_scores(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    *,
    method: Method | None = None,
    ablation: Ablation | str = "patch",
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
    progress: Callable[[int, int], None] | None = None,
) -> EdgeTable:
    """Score every edge of the model; return EDGE rows in canonical order.

    `score` is in the metric's units, mean over examples; `stderr` its standard error.
    `progress(done, total)` is called after each chunk of examples. The chunk size comes
    from `memory_budget` (bytes) unless `batch_size` is given; it changes no score.

    Raises ArgumentError `metric_stationary_at_clean` (EAP with KL), `ablation_unknown`,
    `metric_ignores_logits`, `batch_size_invalid`, `capability_missing`; DataError
    `prompt_lengths_differ` (patch), `metric_not_finite`, `score_not_finite`.
    """
    model = as_backend(model)
    method = method or EAP()
    require(model, Capability.GRADIENTS)
    _refuse_stationary(metric, method)
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    started, clock = now(), time.perf_counter()
    size = batch_size or chunk_size(model, prompts, memory_budget)
    if size < 1:
        raise ArgumentError(
            "batch_size_invalid",
            f"batch_size is {size}; give at least 1",
            value=size,
            expected=">= 1",
        )
    sums = ScoreSum(model)
    with model.frozen():
        for rows in source.chunks(size):
            sums.add_chunk(rows, source, metric, method)
            if progress:
                progress(min(rows.start + size, len(prompts)), len(prompts))
    run = Run(
        kind="edge",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy=edge_policy(method, metric, source),
        provenance=sums.provenance(method, size),
        seed=prompts.seed,
        started_at=started,
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )
    return EdgeTable(sums.rows(), run)


def _refuse_stationary(metric: Metric, method: Method) -> None:
    if metric.stationary_at_clean and all(alpha == 1 for alpha, _ in method.points()):
        raise ArgumentError(
            "metric_stationary_at_clean",
            f"the gradient of {metric.name} is zero at the clean run, so EAP would score "
            "every edge zero; use method=EAPIG(steps=5)",
            metric=metric.name,
            expected="EAPIG",
        )


def edge_policy(
    method: Method, metric: Metric, source: AblationSource
) -> dict[str, Any]:
    """What defines the numbers of an edge table, as plain values."""
    options = {k: v for k, v in vars(method).items() if k != "name"}
    return {
        "method": method.name,
        **({"method_options": options} if options else {}),
        "metric": metric.describe(),
        "ablation": source.record,
        "reduction": "sum_positions_mean_examples",
        "grain": "site",
        "frozen": None,
    }


def chunk_size(model: Backend, prompts: Prompts, memory_budget: int) -> int:
    """Examples per chunk, so that differences and gradients fit the budget."""
    shape = model.shape
    width = shape.d_model * max(len(row) for row in prompts.clean)
    receivers = 3 * shape.n_heads + 8 * shape.n_layers
    item = torch.finfo(model.dtype).bits // 8
    per_example = (len(shape.senders) + receivers) * width * item
    return max(1, min(len(prompts), memory_budget // per_example))


class ScoreSum:
    """Sums and sums of squares of per-example scores, float64 `[sender, receiver]`."""

    def __init__(self, model: Backend):
        self.model = model
        shape = model.shape.edge_mask.shape
        self.total = np.zeros(shape)
        self.squares = np.zeros(shape)
        self.n = 0
        self.points = 0
        self.groups = 0
        self.unreachable: set[int] = set()
        self.metric_clean: list[Tensor] = []
        self.metric_ablated: list[Tensor] = []

    def add_chunk(
        self, rows: Rows, source: AblationSource, metric: Metric, method: Method
    ) -> None:
        """Score one chunk of examples and add it."""
        gradients, difference, batch = self._gradients(rows, source, metric, method)
        per_example = np.zeros((len(batch), *self.total.shape))
        for group, scores in group_scores(self.model, gradients, difference):
            self._check(scores, group, rows.start)
            per_example[:, : scores.shape[1], group.columns] = scores.cpu().numpy()
        self.total += per_example.sum(0)
        self.squares += np.square(per_example).sum(0)
        self.n += len(batch)
        self.unreachable |= gradients.unreachable

    def _gradients(self, rows: Rows, source, metric: Metric, method: Method):
        """Run the chunk's points; return gradients and sender differences."""
        model, batch = self.model, rows.clean
        points = method.points()
        gradients = GradientSum(model, metric)
        clean = None
        if metric.needs_clean or all(alpha != 1 for alpha, _ in points):
            positions = batch.last if metric.positions == "last" else None
            clean, logits = collect(model, batch, positions)
            flat = logits.squeeze(1) if positions is not None else logits
            batch = _with_clean(batch, flat)
            self.metric_clean.append(metric(logits, batch))
        if rows.ablated_logits is not None and rows.donors is not None:
            donors = _with_clean(rows.donors, batch.clean_logits)
            if isinstance(source.ablation, Patch):
                self.metric_ablated.append(metric(rows.ablated_logits, donors))
        for alpha, weight in points:
            taps, collector = self._point(alpha, clean, rows)
            values = gradients.add(batch, taps, weight)
            if collector is not None:
                clean = collector.values()
                self.metric_clean.append(values)
        assert clean is not None
        self.points = len(points)
        difference = _difference(rows.ablated, clean).masked(batch.mask)
        return gradients, difference, batch

    def _point(self, alpha: float, clean: SenderValues | None, rows: Rows):
        """The taps of one point; a collector where the clean values are still needed."""
        if alpha == 1:
            collector = Collector(self.model) if clean is None else None
            taps = [leaf_tap(self.model)]
            return taps + (collector.taps() if collector else []), collector
        assert clean is not None
        start = clean.stream * alpha
        if rows.ablated is not None:
            start = start + rows.ablated.stream * (1 - alpha)
        return [leaf_tap(self.model, start)], None

    def _check(self, scores: Tensor, group: Group, start: int) -> None:
        bad = (~torch.isfinite(scores)).nonzero()
        if len(bad):
            row, sender, column = bad[0].tolist()
            shape = self.model.shape
            receiver = shape.receivers[group.columns[column]]
            edge = f"{shape.senders[sender].name}->{receiver.name}"
            raise DataError(
                "score_not_finite",
                f"the score of {edge} on example {start + row} is not finite; check that "
                "example, or run in float32",
                row=start + row,
                edge=edge,
            )

    def rows(self):
        """EDGE rows: means, standard errors and statuses, in canonical order."""
        senders, receivers = self.model.shape.edge_indices
        mean = self.total[senders, receivers] / self.n
        stderr = None
        if self.n > 1:
            squares = self.squares[senders, receivers]
            variance = (squares - self.n * mean**2).clip(0) / (self.n - 1)
            stderr = np.sqrt(variance / self.n)
        missing = np.isin(receivers, list(self.unreachable))
        status = np.where(missing, "unreachable", "ok")
        return edge_rows(self.model.shape, mean, stderr, self.n, status)

    def provenance(self, method: Method, size: int) -> dict[str, Any]:
        """How it went: counts, batching, and the completeness error where it is known."""
        shape = self.model.shape
        groups = shape.n_layers * (3 + shape.has_mlp) + 1
        found: dict[str, Any] = {
            "sample_count": self.n,
            "points": self.points,
            "receiver_groups": groups,
            "autograd_calls": self.points * (1 + groups),
            "batch_size": size,
            "excluded_counts": {"unreachable": len(self.unreachable)},
        }
        if self.metric_clean and self.metric_ablated:
            clean = torch.cat(self.metric_clean).double().mean()
            ablated = torch.cat(self.metric_ablated).double().mean()
            change = float(ablated - clean)
            first_order = float(self.total[0].sum() / self.n)
            found["completeness_error"] = first_order - change
            found["metric_clean"], found["metric_ablated"] = (
                float(clean),
                float(ablated),
            )
        return found


def _with_clean(batch: TokenBatch, logits: Tensor | None) -> TokenBatch:
    return replace(batch, clean_logits=logits)


def _difference(ablated: SenderValues | None, clean: SenderValues) -> SenderValues:
    """Ablated − clean; None stands for zeros."""
    if ablated is None:
        return clean.map(torch.neg)
    return ablated.minus(clean)


def group_scores(
    model: Backend, gradients: GradientSum, difference: SenderValues
) -> Iterator[tuple[Group, Tensor]]:
    """Per-example scores of each receiver group, `[example, sender, receiver]`."""
    order = range(len(model.shape.senders))
    senders = expand(model, difference, order)
    for group in gradients.groups():
        seen = senders[: int(model.shape.upstream[group.columns[0]])]
        if group.positions is not None:
            index = group.positions[None, ..., None]
            index = index.expand(len(seen), -1, -1, seen.shape[-1])
            seen = seen.gather(2, index)
        left = seen.transpose(0, 1).flatten(2)
        right = group.gradient.transpose(0, 1).flatten(2)
        yield group, torch.bmm(left, right.transpose(1, 2))
