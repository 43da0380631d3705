"""The query-key correction of AtP* for edges (Kramár et al. 2024, §3.2.1).

A first-order score fails where a softmax is saturated: the gradient there is nearly zero
though a large enough change moves the attention. For edges into a head's q or k, the
attention pattern is recomputed with that one contribution corrupted, and only what
follows the pattern is linear:

    score(u→h<q>) = Σ (pattern(q with ablated u) − pattern) · ∂M/∂pattern_h

One pass through one layer's attention, with the senders as rows, serves all its heads.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.metrics import Metric
from circuitlab.receivers import leaf_tap
from circuitlab.senders import SenderValues, expand

ROWS_AT_ONCE = 256
"""How many (sender, example) rows one attention pass takes."""


def pattern_site(layer: int) -> Site:
    """Where a layer's attention pattern `[example, head, query, key]` is."""
    return Site(f"blocks.{layer}.attn.hook_pattern")


class PatternPass:
    """The clean patterns and streams of one chunk, and ∂M/∂pattern."""

    def __init__(self, model: Backend, batch: TokenBatch, metric: Metric):
        self.model = model
        self.batch = batch
        self.patterns: dict[int, Tensor] = {}
        self.streams: dict[int, Tensor] = {}
        taps = [leaf_tap(model)]
        for layer, sites in enumerate(model.layers):
            taps.append(Tap(pattern_site(layer), self._keep(layer)))
            taps.append(Tap(sites.attention_stream, self._stream(layer)))
        positions = batch.last if metric.positions == "last" else None
        logits = model.run(batch, taps, grad=True, positions=positions)
        order = sorted(self.patterns)
        found = torch.autograd.grad(
            metric(logits, batch).sum(),
            [self.patterns[layer] for layer in order],
            allow_unused=True,
        )
        self.gradients = dict(zip(order, found, strict=True))

    def _keep(self, layer: int):
        def fn(value: Tensor) -> Tensor:
            self.patterns[layer] = value.view_as(value)
            return self.patterns[layer]

        return fn

    def _stream(self, layer: int):
        def fn(value: Tensor) -> None:
            self.streams[layer] = value.detach()

        return fn

    @torch.no_grad()
    def scores(
        self, difference: SenderValues
    ) -> Iterator[tuple[np.ndarray, int, Tensor]]:
        """Yield columns, first sender and scores `[example, sender, receiver]` for each
        layer's q and k receivers. `difference` covers every position."""
        shape = self.model.shape
        for layer in range(shape.n_layers):
            gradient = self.gradients.get(layer)
            if gradient is None:
                continue
            for port in ("q", "k"):
                columns = shape.columns(layer, port)
                stop = int(shape.upstream[columns[0]])
                step = max(1, ROWS_AT_ONCE // len(self.batch))
                for first in range(0, stop, step):
                    some = expand(
                        self.model, difference, first, min(first + step, stop)
                    )
                    changed = self._pattern(layer, port, some)
                    change = changed - self.patterns[layer].detach()
                    moved = (change * gradient).sum((-2, -1))
                    yield columns, first, self._by_receiver(moved, port)

    def _by_receiver(self, moved: Tensor, port: str) -> Tensor:
        """`[sender, example, head]` → `[example, sender, receiver]`: keys are shared."""
        if port == "k":
            moved = moved.unflatten(-1, (self.model.shape.n_kv_heads, -1)).sum(-1)
        return moved.transpose(0, 1)

    def _pattern(self, layer: int, port: str, senders: Tensor) -> Tensor:
        """Patterns `[sender, example, head, query, key]` with each sender ablated for
        one port alone."""
        model, count = self.model, len(senders)
        stream = self.streams[layer]
        weight, bias = model.projection(layer, port)
        normed = model.norm(layer, "attention")(stream + senders)
        projected = normed @ weight.flatten(0, 1).t()
        projected = projected if bias is None else projected + bias.flatten()
        seen: list[Tensor] = []
        site = Site(getattr(model.layers[layer], port).path, "instead")
        taps = [
            Tap(site, lambda _: projected.flatten(0, 1)),
            Tap(pattern_site(layer), lambda value: seen.append(value.detach())),
            *(model.bypass(later) for later in range(layer + 1, model.shape.n_layers)),
        ]
        rows = self.batch.repeat(count)
        start = stream.repeat(count, 1, 1)
        model.run(rows, taps, resume=(layer, start), positions=rows.last)
        return seen[0].unflatten(0, (count, -1))
