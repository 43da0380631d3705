"""Sums of per-example edge scores over chunks of examples.

Takes chunks with their ablated values, gives means, standard errors and statuses. A
chunk's gradients come from `receivers.py`; here they meet the sender differences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from circuitlab.ablated_side import all_heads
from circuitlab.ablations import AblationSource, Patch, Rows
from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.combining import moments
from circuitlab.errors import DataError
from circuitlab.methods import Stage
from circuitlab.metrics import Metric, with_clean_logits
from circuitlab.prompts import Prompts
from circuitlab.qk import PatternPass
from circuitlab.receivers import GradientSum, Group, leaf_tap
from circuitlab.senders import Collector, SenderValues, collect, expand
from circuitlab.sites import ModelShape
from circuitlab.tables import edge_rows

BLOCK_BYTES = 24 << 20
"""The size of one block of sender differences, unless that is too few senders."""

CPU_TOKENS = 256
"""Tokens that one chunk takes on a CPU: a pass is as fast per token from there on, and
products over more no longer fit its caches."""

SENDERS_AT_ONCE = 64
"""The fewest senders in a block: matrix products want many at once."""

Grain = Literal["site", "position", "example"]


@dataclass
class ScoreSum:
    """Sums and sums of squares of per-example scores, float64.

    `[sender, receiver]`, or `[position, sender, receiver]` at grain `position`. At grain
    `example` every example's matrix is kept.
    """

    model: Backend
    grain: Grain = "site"
    by_head: bool = False
    sender_block: int | None = None
    n: int = 0
    points: int = 0
    total: np.ndarray | None = None
    squares: np.ndarray | None = None
    examples: list[np.ndarray] = field(default_factory=list)
    reached: set[int] = field(default_factory=set)
    metric_clean: list[Tensor] = field(default_factory=list)
    metric_ablated: list[Tensor] = field(default_factory=list)

    def add_chunk(
        self,
        rows: Rows,
        source: AblationSource,
        metric: Metric,
        stages: list[Stage],
        *,
        qk_correction: bool = False,
    ) -> None:
        """Score one chunk of examples and add it, whole or not at all."""
        chunk = Chunk(self.model, rows, source, metric)
        found = self._empty(rows.clean)
        for stage in stages:
            gradients = chunk.gradients(stage)
            for group, scores, first in self._scores(chunk, gradients, stage):
                check_finite(self.model.shape, scores, group, rows.start, first)
                block = found[..., first : first + scores.shape[-2], :]
                block[..., group.columns] += scores.double().cpu().numpy()
            everyone = range(len(self.model.shape.receivers))
            self.reached.update(set(everyone) - gradients.unreachable)
        if qk_correction:
            correct_queries_and_keys(chunk, found)
        found *= self.model.shape.edge_mask
        sums = self._plus(tied(found, self.model.shape) if self.by_head else found)
        sums["points"] = sum(len(stage.points) for stage in stages)
        sums["metric_clean"] = [*self.metric_clean, chunk.metric_clean]
        if isinstance(source.ablation, Patch):
            sums["metric_ablated"] = [*self.metric_ablated, chunk.metric_ablated]
        # In one step, so that an interrupt finds the chunk in or out as a whole.
        vars(self).update(sums)

    def _empty(self, batch: TokenBatch) -> np.ndarray:
        matrix = self.model.shape.edge_mask.shape
        if self.grain == "position":
            return np.zeros((len(batch), batch.tokens.shape[1], *matrix))
        return np.zeros((len(batch), *matrix))

    def _plus(self, found: np.ndarray) -> dict[str, Any]:
        """The sums with one chunk's scores added."""
        return {
            "total": self._plus_one(self.total, found.sum(0)),
            "squares": self._plus_one(self.squares, np.square(found).sum(0)),
            "examples": [*self.examples, *(found if self.grain == "example" else ())],
            "n": self.n + len(found),
        }

    def _plus_one(self, before: np.ndarray | None, more: np.ndarray) -> np.ndarray:
        if before is None:
            return more
        if self.grain == "position":
            before, more = _padded(before, len(more)), _padded(more, len(before))
        return before + more

    def _scores(
        self, chunk: Chunk, gradients: GradientSum, stage: Stage
    ) -> Iterator[tuple[Group, Tensor, int]]:
        """Scores of each receiver group, `[example, sender, receiver]` (with a position
        axis second at that grain), and the first sender they start from.

        Pairs that are no edge hold numbers without meaning.
        """
        upstream = self.model.shape.upstream
        held = self.sender_block or stage.stop
        for start in range(stage.first, stage.stop, held):
            stop = min(start + held, stage.stop)
            blocks = list(self._expanded(chunk, start, stop))
            for group in gradients.groups():
                most = int(upstream[group.columns].max())
                for first, senders in blocks:
                    seen = senders[: max(0, most - first)]
                    if len(seen) == 0:
                        continue
                    if self.grain == "position":
                        scores = _by_position(seen, group, chunk.start, chunk.length)
                    else:
                        scores = _summed(seen, group)
                    yield group, scores, first

    def _expanded(self, chunk: Chunk, start: int, stop: int):
        """The sender differences from `start` to `stop`, in blocks that the allocator
        can place where the pass's activations were."""
        row = chunk.difference.stream
        bytes_each = max(1, row.numel() * row.element_size())
        step = max(SENDERS_AT_ONCE, BLOCK_BYTES // bytes_each)
        for first in range(start, stop, step):
            yield (
                first,
                expand(self.model, chunk.difference, first, min(first + step, stop)),
            )

    @property
    def unreachable(self) -> list[int]:
        """Receivers that no stage's gradients reached."""
        everyone = range(len(self.model.shape.receivers))
        return [i for i in everyone if i not in self.reached]

    def rows(self) -> pa.Table:
        """EDGE rows in canonical order, one per edge (and position or example)."""
        assert self.total is not None
        assert self.squares is not None
        shape = self.model.shape
        senders, receivers = shape.edge_indices
        missing = np.isin(receivers, self.unreachable)
        status = np.where(missing, "unreachable", "ok").tolist()
        if self.grain == "example":
            tables = [
                edge_rows(shape, one[senders, receivers], None, 1, status)
                for one in self.examples
            ]
            return _stacked(tables, "sample_id", list(map(str, range(self.n))))
        if self.grain == "position":
            pairs = zip(self.total, self.squares, strict=True)
            tables = [self._table(total, squares, status) for total, squares in pairs]
            return _stacked(tables, "position", list(range(len(tables))))
        return self._table(self.total, self.squares, status)

    def _table(self, total: np.ndarray, squares: np.ndarray, status) -> pa.Table:
        senders, receivers = self.model.shape.edge_indices
        mean, stderr = moments(
            total[senders, receivers], squares[senders, receivers], self.n
        )
        return edge_rows(self.model.shape, mean, stderr, self.n, status)

    def provenance(self) -> dict[str, Any]:
        """How it went: counts, and the completeness error where it is known.

        `completeness_error` is Σ scores out of the input − (M(corrupted) − M(clean)):
        what integrating the gradient leaves over, in the metric's units.
        """
        assert self.total is not None
        shape = self.model.shape
        groups = shape.n_layers * (3 + shape.has_mlp) + 1
        found: dict[str, Any] = {
            "sample_count": self.n,
            "points": self.points,
            "receiver_groups": groups,
            "autograd_calls": self.points * (1 + groups),
            "excluded_counts": {"unreachable": len(self.unreachable)},
            "metric_clean": float(torch.cat(self.metric_clean).double().mean()),
        }
        if self.metric_ablated and not self.by_head:
            ablated = float(torch.cat(self.metric_ablated).double().mean())
            out_of_input = float(self.total[..., 0, :].sum() / self.n)
            found["metric_ablated"] = ablated
            found["completeness_error"] = out_of_input - (
                ablated - found["metric_clean"]
            )
        return found


def tied(scores: np.ndarray, shape: ModelShape) -> np.ndarray:
    """Give every port of a head (or KV group) the sum over its ports."""
    out = scores.copy()
    per_group = shape.n_heads // shape.n_kv_heads
    for layer in range(shape.n_layers):
        ports = [shape.columns(layer, port) for port in "qkv"]
        for group in range(shape.n_kv_heads):
            queries = ports[0][group * per_group : (group + 1) * per_group]
            columns = np.array([*queries, ports[1][group], ports[2][group]])
            out[..., columns] = scores[..., columns].sum(-1, keepdims=True)
    return out


def check_finite(
    shape: ModelShape, scores: Tensor, group: Group, start: int, first: int
) -> None:
    """Raise DataError `score_not_finite` naming the example and the edge."""
    if bool(torch.isfinite(scores).all()):
        return
    bad = (~torch.isfinite(scores)).nonzero()[0].tolist()
    row, sender, column = bad[0], bad[-2] + first, bad[-1]
    receiver = shape.receivers[int(group.columns[column])]
    edge = f"{shape.senders[sender].name}->{receiver.name}"
    raise DataError(
        "score_not_finite",
        f"the score of {edge} on example {start + row} is not finite; check that "
        "example, or run in float32",
        row=start + row,
        edge=edge,
    )


def _summed(seen: Tensor, group: Group) -> Tensor:
    if group.positions is not None:
        index = group.positions[None, ..., None]
        seen = seen.gather(2, index.expand(len(seen), -1, -1, seen.shape[-1]))
    left = seen.transpose(0, 1).flatten(2)
    right = group.gradient.transpose(0, 1).flatten(2)
    return torch.bmm(left, right.transpose(1, 2))


def _by_position(seen: Tensor, group: Group, start: int, length: int) -> Tensor:
    """`[example, position, sender, receiver]`; zero before `start`."""
    examples = seen.shape[1]
    out = seen.new_zeros(examples, length, len(seen), len(group.columns))
    if group.positions is None:
        left, right = seen.permute(1, 2, 0, 3), group.gradient.permute(1, 2, 3, 0)
        out[:, start:] = left @ right
        return out
    index = group.positions[None, ..., None]
    picked = seen.gather(2, index.expand(len(seen), -1, -1, seen.shape[-1]))
    scores = picked.permute(1, 2, 0, 3) @ group.gradient.permute(1, 2, 3, 0)
    rows = torch.arange(examples, device=seen.device)[:, None]
    out[rows, group.positions + start] = scores
    return out


def _padded(value: np.ndarray, length: int) -> np.ndarray:
    missing = max(0, length - len(value))
    return np.concatenate([value, np.zeros((missing, *value.shape[1:]))])


def _stacked(tables: list[pa.Table], column: str, values: list) -> pa.Table:
    whole = []
    for table, value in zip(tables, values, strict=True):
        at = table.schema.get_field_index(column)
        kind = table.schema.field(at).type
        whole.append(
            table.set_column(at, column, pa.array([value] * table.num_rows, kind))
        )
    return pa.concat_tables(whole)


def chunk_size(
    model: Backend, prompts: Prompts, memory_budget: int, grain: Grain = "site"
) -> int:
    """Examples per chunk, so that differences, gradients and per-example scores fit the
    budget (bytes)."""
    row, rest = _row_bytes(model, prompts)
    matrices = max(map(len, prompts.clean)) if grain == "position" else 1
    scores = 8 * matrices * model.shape.edge_mask.size
    one = (len(model.shape.senders) + rest) * row + scores
    size = min(len(prompts), memory_budget // one)
    if model.device.type == "cpu":
        size = min(size, CPU_TOKENS // max(map(len, prompts.clean)))
    return max(1, size)


def sender_block(model: Backend, prompts: Prompts, memory_budget: int) -> int:
    """Senders expanded at once: all of them, unless one example alone is too large."""
    row, rest = _row_bytes(model, prompts)
    return min(len(model.shape.senders), max(1, memory_budget // row - rest))


def _row_bytes(model: Backend, prompts: Prompts) -> tuple[int, int]:
    """Bytes of one `[pos, d_model]`, and how many of them gradients take."""
    item = torch.finfo(model.dtype).bits // 8
    length = max(len(row) for row in prompts.clean)
    rest = 3 * model.shape.n_heads + 8 * model.shape.n_layers + 128
    return model.shape.d_model * length * item, rest


class Chunk:
    """One chunk's clean and ablated values, and the gradients of any stage."""

    def __init__(
        self, model: Backend, rows: Rows, source: AblationSource, metric: Metric
    ):
        self.model = model
        self.rows = rows
        self.metric = metric
        self.batch = rows.clean
        self.start = rows.first_difference
        self.length = rows.clean.tokens.shape[1]
        self._clean: SenderValues | None = None
        self._metric_clean: Tensor | None = None
        if metric.needs_clean:
            self._run_clean()

    def gradients(self, stage: Stage) -> GradientSum:
        """Receiver gradients summed over the stage's points."""
        found = GradientSum(self.model, self.metric, self.start)
        for alpha, weight in stage.points:
            collector = None
            if alpha == 1 and stage.kind == "input" and self._clean is None:
                collector = Collector(self.model)
            taps = self._taps(stage, alpha)
            taps += collector.taps() if collector else []
            values = found.add(self.batch, taps, weight)
            if collector:
                self._clean, self._metric_clean = collector.values(), values
        return found

    def _taps(self, stage: Stage, alpha: float) -> list[Tap]:
        if alpha == 1 and stage.kind == "input":
            return [leaf_tap(self.model)]
        clean, ablated = self.clean, self.rows.ablated
        if stage.kind == "input":
            start = _mixed(clean.stream, ablated and ablated.stream, alpha)
            return [leaf_tap(self.model, start)]
        layer = stage.layer
        assert layer is not None
        if stage.kind == "mlp":
            value = _mixed(clean.mlps[layer], ablated and ablated.mlps[layer], alpha)
            site = self.model.layers[layer].mlp_out
        else:
            heads = _mixed(clean.heads[layer], ablated and ablated.heads[layer], alpha)
            value = all_heads(self.model, layer, heads)
            post = self.model.layers[layer].attention_post
            site = Site(post) if post else self.model.layers[layer].attention_out
        assert site is not None
        value = value / self.model.mlp_scale(layer)
        return [leaf_tap(self.model), Tap(site, lambda _: value)]

    @property
    def clean(self) -> SenderValues:
        """Sender values of the clean run."""
        if self._clean is None:
            self._run_clean()
        assert self._clean is not None
        return self._clean

    def _run_clean(self) -> None:
        last = self.metric.positions == "last"
        positions = self.batch.last if last else None
        self._clean, logits = collect(self.model, self.batch, positions)
        self.batch = with_clean_logits(self.batch, logits, self.metric)
        self._metric_clean = self.metric(logits, self.batch)

    @property
    def metric_clean(self) -> Tensor:
        """The metric of the clean run, per example."""
        _ = self.clean
        assert self._metric_clean is not None
        return self._metric_clean

    @property
    def metric_ablated(self) -> Tensor:
        """The metric of the donors' run, per example."""
        assert self.rows.donors is not None
        assert self.rows.ablated_logits is not None
        donors = replace(self.rows.donors, clean_logits=self.batch.clean_logits)
        return self.metric(self.rows.ablated_logits, donors)

    @cached_property
    def difference(self) -> SenderValues:
        """Ablated − clean at every real token from `start` on."""
        return self.whole_difference.map(lambda value: value[:, self.start :])

    @property
    def whole_difference(self) -> SenderValues:
        """Ablated − clean at every real token."""
        ablated = self.rows.ablated
        found = (
            self.clean.map(torch.neg) if ablated is None else ablated.minus(self.clean)
        )
        return found.masked(self.batch.mask)


def correct_queries_and_keys(chunk: Chunk, found: np.ndarray) -> None:
    """Overwrite the scores `[example, sender, receiver]` of edges into queries and keys
    with those of recomputed attention patterns (`qk.py`)."""
    patterns = PatternPass(chunk.model, chunk.batch, chunk.metric)
    for columns, first, scores in patterns.scores(chunk.whole_difference):
        block = found[:, first : first + scores.shape[1]]
        block[..., columns] = scores.double().cpu().numpy()


def _mixed(clean: Tensor, ablated: Tensor | None, alpha: float) -> Tensor:
    """ablated + α(clean − ablated); None stands for zeros."""
    mixed = clean * alpha
    return mixed if ablated is None else mixed + ablated * (1 - alpha)
