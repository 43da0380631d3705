"""Run circuits: every edge outside carries its ablated value, receiver by receiver.

Every receiver's input is assembled apart, so an edge can be cut for one receiver and
kept for another:

    x_v = (ablated stream at v) + Σ over kept edges u→v of (current_u − ablated_u)

The ablated stream is built once per chunk of prompts; what is kept is added back, so a
sparse circuit costs little beyond its forward. K circuits run as K copies of the rows.
Components that no kept edge leaves are not computed at all, and the others only at the
tokens where they matter (`windows`).

Masks may be floating gates in [0, 1]; then the run is differentiable in them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablated_side import AblatedSide
from circuitlab.backends import Backend
from circuitlab.circuit_pass import Chunk, CircuitPass
from circuitlab.windows import Windows, windows
from circuitlab.wiring import Plan, Reach, wiring_of


def run_circuits(
    model: Backend, chunk: Chunk, masks: Tensor | Sequence[np.ndarray]
) -> Tensor:
    """Run K circuits on one chunk; logits `[circuit, example, pos, d_vocab]`, with one
    position where the chunk has `positions`.

    `masks` bool (or gates, float, maybe requiring grad) `[circuit, sender, receiver]`.
    Where a gate is neither 0 nor 1 its edge carries `gate · current + (1 − gate) ·
    ablated`. A gate of exactly 0 is a cut edge, whose derivative may be missing.
    """
    gates = torch.as_tensor(np.stack(masks)) if not isinstance(masks, Tensor) else masks
    gates = gates.to(model.device)
    grad = gates.requires_grad
    edges = torch.as_tensor(model.shape.edge_mask, device=gates.device)
    gates = gates * edges
    kept = np.asarray((gates.detach() != 0).any(0).cpu())
    wiring = wiring_of(model)
    plan = wiring.whole(kept)
    positions, side = chunk.positions, chunk.side
    reach = wiring.everywhere() if positions is None else wiring.reach(kept)
    where = windows(side.first, positions)
    with torch.set_grad_enabled(grad):
        weights = gates.to(model.dtype).transpose(1, 2)
        values = _Banks(side, where, reach, plan, weights)
        parts = chunk, wiring, plan, reach, where, values
        stream = bool(kept[0].any())
        return CircuitPass(model, *parts, len(gates), stream).run(grad=grad)


class _Banks:
    """The values of K circuits: differences of all senders that a kept edge leaves, at
    every token where they matter there, and at the end. `masks` `[circuit, receiver,
    sender]`."""

    def __init__(
        self,
        side: AblatedSide,
        where: Windows,
        reach: Reach,
        plan: Plan,
        masks: Tensor,
    ):
        self.side = side
        self.windows = where
        everywhere = np.flatnonzero(plan.changed & reach.senders)
        at_end = np.flatnonzero(plan.changed & where.differ)
        final = side.final
        self.every = _Bank(masks[:, :, everywhere], where.every.take(final))
        self.end = _Bank(masks[:, :, at_end], where.end.take(final))

    def inputs(self, columns: Sequence[int], everywhere: bool) -> Tensor:
        """See `Values`."""
        bank = self.every if everywhere else self.end
        base = self.windows.of(everywhere).take(self.side.seen_by(columns[0]))
        return bank.add(columns, base).flatten(1, 2)

    def keep(self, senders: np.ndarray, change: Tensor, everywhere: bool) -> None:
        """See `Values`."""
        del senders  # they come in order
        if everywhere:
            self.every.push(change)
        if self.windows.differ:
            self.end.push(self.windows.at_end(change) if everywhere else change)

    def port(self, layer: int, port: str) -> Tensor:
        """See `Values`."""
        return self.side.projections[layer, port]

    def keep_port(self, layer: int, port: str, found: Tensor) -> None:
        """See `Values`."""


class _Bank:
    """Current-minus-ablated sender differences at some tokens, pushed in canonical order,
    and what a mask adds up of them.

    `masks` `[copy, receiver, sender]` of the bank's own senders; `like` `[example, pos,
    d_model]` has the tokens' shape.
    """

    def __init__(self, masks: Tensor, like: Tensor):
        self.masks = masks
        self.count = 0
        self.shape = (len(masks), *like.shape)
        self._blocks: list[Tensor] = []
        self._buffer = None
        if not masks.requires_grad:
            size = (masks.shape[2], len(masks), like.numel())
            self._buffer = like.new_empty(size)

    def push(self, block: Tensor) -> None:
        """Add differences `[sender, copy·example, pos, d_model]`."""
        flat = block.reshape(len(block), self.shape[0], -1)
        if self._buffer is None:
            self._blocks.append(flat)
        else:
            self._buffer[self.count : self.count + len(block)] = flat
        self.count += len(block)

    def add(self, columns: Sequence[int], base: Tensor) -> Tensor:
        """`base + mask · differences`: `[receiver, copy, example, pos, d_model]`, for
        some receivers; `base` is `[example, pos, d_model]`."""
        shape = (len(columns), *self.shape)
        if self.count == 0:
            return base.expand(shape)
        seen, mask = self._seen(), self.masks[:, columns][:, :, : self.count]
        used = mask.detach().any(0).any(0).nonzero()[:, 0]
        if 2 * len(used) < self.count:
            # Most senders are cut here: reading the few that aren't is cheaper.
            seen, mask = seen[used], mask[:, :, used]
        kept = torch.bmm(mask, seen.transpose(0, 1))
        return kept.transpose(0, 1).reshape(shape) + base

    def _seen(self) -> Tensor:
        if self._buffer is None:
            return torch.cat(self._blocks)
        return self._buffer[: self.count]
