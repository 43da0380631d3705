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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import Rows
from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.senders import SenderValues, constant_writes, head_writes
from circuitlab.sites import PORTS
from circuitlab.windows import Window, windows
from circuitlab.wiring import wiring_of


@dataclass(frozen=True)
class AblatedSide:
    """The fully ablated run of one chunk, from compact sender values.

    `attention`, `mlp` and `final` are the pre-norm streams `[example, pos, d_model]`
    that receivers would see with every edge cut. `first` is the first position at which
    anything may differ from the full model's run.
    """

    model: Backend
    values: SenderValues
    attention: tuple[Tensor, ...]
    mlp: tuple[Tensor, ...]
    final: Tensor
    first: int

    @cached_property
    def projections(self) -> dict[tuple[int, str], Tensor]:
        """Each port's output `[example, pos, head, d_head]` with every edge cut."""
        return {
            (layer, port): self._project(layer, port)
            for layer in range(self.model.shape.n_layers)
            for port in PORTS
        }

    def _project(self, layer: int, port: str) -> Tensor:
        normed = self.model.norm(layer, "attention")(self.attention[layer])
        weight, bias = self.model.projection(layer, port)
        out = normed @ weight.flatten(0, 1).t()
        out = out.unflatten(-1, weight.shape[:2])
        return out if bias is None else out + bias


def ablated_side(model: Backend, rows: Rows) -> AblatedSide:
    """Sum a chunk's ablated senders into the streams."""
    values = rows.ablated or _zeros(model, rows.clean)
    stream = values.stream
    attention, mlp = [], []
    for layer in range(model.shape.n_layers):
        before = stream
        attention.append(before)
        stream = before + all_heads(model, layer, values.heads[layer])
        if model.shape.has_mlp:
            mlp.append(before if model.shape.parallel else stream)
            stream = stream + values.mlps[layer]
    streams = tuple(attention), tuple(mlp), stream
    return AblatedSide(model, values, *streams, rows.first_difference)


def _zeros(model: Backend, batch: TokenBatch) -> SenderValues:
    shape = model.shape
    size = batch.tokens.shape
    options = {"device": model.device, "dtype": model.dtype}
    stream = torch.zeros(*size, shape.d_model, **options)
    width = (shape.n_heads, shape.d_head) if shape.split_heads else (1, shape.d_model)
    heads = torch.zeros(*size, *width, **options)
    mlps = (stream,) * shape.n_layers if shape.has_mlp else ()
    return SenderValues(stream, (heads,) * shape.n_layers, mlps)


def all_heads(model: Backend, layer: int, heads: Tensor) -> Tensor:
    """Σ over heads of what they add, and the bias that no ablation moves."""
    if not model.shape.split_heads:
        return heads[:, :, 0]
    weight, _ = model.output_projection(layer)
    written = heads.flatten(2) @ weight.flatten(0, 1)
    constant = constant_writes(model, layer)
    return written if constant is None else written + constant


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

    def add(self, columns: Sequence[int] | np.ndarray, base: Tensor) -> Tensor:
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


class CircuitPass:
    """One pass of K circuits over one chunk: the taps, and what they share.

    `masks` `[circuit, sender, receiver]`, bool or gates. `positions` as in
    `run_circuits`.
    """

    def __init__(
        self,
        model: Backend,
        batch: TokenBatch,
        side: AblatedSide,
        masks: Tensor,
        positions: Tensor | None,
    ):
        self.model = model
        self.batch = batch
        self.side = side
        self.positions = positions
        self.copies = len(masks)
        self.wiring = wiring_of(model)
        self.grad = masks.requires_grad
        masks = masks * torch.as_tensor(model.shape.edge_mask, device=masks.device)
        kept = np.asarray((masks.detach() != 0).any(0).cpu())
        self.active = _active_senders(model, kept)
        self._kept = np.asarray(kept[self.active].any(0))
        self.windows = windows(side.first, positions)
        # A gate that is shut has a derivative too, wherever it would lead.
        leads = model.shape.edge_mask if self.grad else kept
        self.reach = (
            self.wiring.everywhere() if positions is None else self.wiring.reach(leads)
        )
        self.every, self.end = self._banks(masks.to(model.dtype).transpose(1, 2))

    def _banks(self, masks: Tensor) -> tuple[_Bank, _Bank]:
        """Differences at every token, of senders that matter there; and at the end."""
        reach, wiring = self.reach, self.wiring
        wide = np.zeros(masks.shape[2], dtype=bool)
        wide[0] = reach.stream
        for layer, rows in enumerate(wiring.heads):
            wide[rows] = reach.heads[layer]
            wide[wiring.mlps[layer]] = reach.mlps[layer]
        everywhere = self.active[wide[self.active]]
        at_end = self.active if self.positions is not None else self.active[:0]
        final, take = self.side.final, self.windows
        return (
            _Bank(masks[:, :, everywhere], take.every.take(final)),
            _Bank(masks[:, :, at_end], take.end.take(final)),
        )

    def run(self) -> Tensor:
        """Logits `[circuit·example, …]`."""
        rows, positions = self.batch.repeat(self.copies), self.positions
        if positions is not None:
            positions = positions.repeat(self.copies)
        return self.model.run(rows, self._taps(), grad=self.grad, positions=positions)

    def _taps(self) -> list[Tap]:
        taps = [Tap(self.model.stream, self._push_stream)]
        for layer, sites in enumerate(self.model.layers):
            heads = self._own(self.wiring.heads[layer])
            mlp = self._own(self.wiring.mlps[layer])
            if not len(heads) and not len(mlp):
                taps.append(self.model.bypass(layer))
                continue
            taps += [
                Tap(Site(getattr(sites, port).path, "instead"), self._port(layer, port))
                for port in PORTS
            ]
            taps += self._attention_taps(layer, heads)
            taps += self._mlp_taps(layer, mlp)
        return [*taps, Tap(self.model.final_stream, self._final)]

    def _own(self, senders: np.ndarray) -> np.ndarray:
        """Those of some senders that are active."""
        return senders[np.isin(senders, self.active)]

    # --- differences in, inputs out ---

    def _push(self, value: Tensor, ablated: Tensor, everywhere: bool) -> None:
        """Keep a sender's value `[row, pos, d_model]` at its window."""
        window = self.windows.of(everywhere)
        change = value.unflatten(0, (self.copies, -1)) - window.take(ablated)
        self._push_change(change.flatten(0, 1)[None], everywhere)

    def _push_change(self, change: Tensor, everywhere: bool) -> None:
        """Keep differences `[sender, row, pos, d_model]` that are at their window."""
        if everywhere:
            self.every.push(change)
            if self.positions is None:
                return
            rows = change.flatten(0, 1)
            change = self.windows.tail.take(rows).unflatten(0, change.shape[:2])
        self.end.push(change)

    def _input(self, columns, base: Tensor, everywhere: bool) -> Tensor:
        """Receivers' inputs at their window, `[receiver, row, pos, d_model]`."""
        bank = self.every if everywhere else self.end
        x = bank.add(columns, self.windows.of(everywhere).take(base))
        return x.flatten(1, 2)

    def _push_stream(self, stream: Tensor) -> None:
        if len(self.active) and self.active[0] == 0:
            everywhere = self.reach.stream
            window, copies = self.windows.of(everywhere), (self.copies, 1, 1)
            value = window.take(stream[: len(self.batch)]).repeat(copies)
            self._push(value, self.side.values.stream, everywhere)

    # --- attention ---

    def _port(self, layer: int, port: str) -> Callable[[Tensor], Tensor]:
        """A port's output for every copy; cut heads carry their ablated one."""

        def fn(_: Tensor) -> Tensor:
            ablated = self.side.projections[layer, port]
            columns = self.wiring.columns[layer, port]
            heads = [i for i, c in enumerate(columns) if self._needed(int(c))]
            out = ablated.repeat(self.copies, 1, 1, 1)
            if heads:
                everywhere = self.reach.of(layer, port)
                found = self._project(layer, port, heads, columns[heads], everywhere)
                self.windows.of(everywhere).put(found, out, heads)
            return out.flatten(2)

        return fn

    def _needed(self, column: int) -> bool:
        fed = self.wiring.feeds[column, self.active]
        return bool(self._kept[column]) and bool(fed.any())

    def _project(
        self, layer: int, port: str, heads: list[int], columns, everywhere: bool
    ) -> Tensor:
        """Outputs `[row, pos, head, d_head]` of some of a port's heads."""
        x = self._input(columns, self.side.attention[layer], everywhere)
        normed = self.model.norm(layer, "attention")(x)
        weight, bias = self.model.projection(layer, port)
        out = torch.bmm(normed.flatten(1, 2), weight[heads].transpose(1, 2))
        out = out.unflatten(1, x.shape[1:3]).permute(1, 2, 0, 3)
        return out if bias is None else out + bias[heads]

    def _attention_taps(self, layer: int, heads: np.ndarray) -> list[Tap]:
        sites = self.model.layers[layer]
        if not self.model.shape.split_heads:
            assert sites.attention_post is not None
            push = self._push_whole(layer, heads)
            return [Tap(Site(sites.attention_post), push)]
        own = (heads - self.wiring.heads[layer][0]).tolist()
        if sites.attention_post is None:
            # Nobody reads the stream itself, so the output projection need not run.
            project = Site(sites.attention_out.path, "instead")
            return [Tap(project, self._push_heads(layer, own))]
        seen: list[Tensor] = []
        return [
            Tap(sites.z, seen.append),
            Tap(sites.attention_out, self._push_scaled(layer, own, seen)),
        ]

    def _push_heads(self, layer: int, own: list[int]) -> Callable[[Tensor], Tensor]:
        def fn(z: Tensor) -> Tensor:
            self._push_z(layer, own, z.unflatten(-1, (self.model.shape.n_heads, -1)))
            return z.new_zeros(*z.shape[:2], self.model.shape.d_model)

        return fn

    def _push_scaled(self, layer: int, own: list[int], seen: list[Tensor]):
        def fn(out: Tensor) -> None:
            r = self.model.post_scale(layer, out)
            assert r is not None
            z = seen.pop().unflatten(-1, (self.model.shape.n_heads, -1))
            self._push_z(layer, own, z * r[..., None])

        return fn

    def _push_z(self, layer: int, own: list[int], heads: Tensor) -> None:
        if not own:
            return
        everywhere = self.reach.heads[layer]
        take = self.windows.of(everywhere).take
        now, ablated = take(heads), take(self.side.values.heads[layer])
        change = now.unflatten(0, (self.copies, -1)) - ablated
        change = change.flatten(0, 1)[:, :, own]
        wrote = head_writes(self.model, layer, change, own)
        self._push_change(wrote, everywhere)

    def _push_whole(self, layer: int, heads: np.ndarray) -> Callable[[Tensor], None]:
        def fn(value: Tensor) -> None:
            if len(heads):
                everywhere = self.reach.heads[layer]
                value = self.windows.of(everywhere).take(value)
                self._push(value, self.side.values.heads[layer][:, :, 0], everywhere)

        return fn

    # --- MLP and logits ---

    def _mlp_taps(self, layer: int, own: np.ndarray) -> list[Tap]:
        sites = self.model.layers[layer]
        if sites.mlp_in is None or sites.mlp_out is None:
            return []
        if not len(own):
            if sites.mlp_in.path.endswith(".mlp"):
                return [Tap(Site(sites.mlp_in.path, "instead"), torch.zeros_like)]
            return []
        return [
            Tap(sites.mlp_in, self._mlp_input(layer)),
            Tap(sites.mlp_out, self._push_mlp(layer)),
        ]

    def _mlp_input(self, layer: int) -> Callable[[Tensor], Tensor]:
        columns = self.wiring.columns[layer, "in"]
        base, everywhere = self.side.mlp[layer], self.reach.mlps[layer]

        def fn(_: Tensor) -> Tensor:
            x = self._input(columns, base, everywhere)[0]
            if not self.model.layers[layer].mlp_apart:
                x = self._spread(x, base, self.windows.of(everywhere))
            return self.model.norm(layer, "mlp")(x)

        return fn

    def _spread(self, x: Tensor, base: Tensor, window: Window) -> Tensor:
        """An input at all tokens, `[row, pos, d_model]`, from that at a window."""
        whole = base.repeat(self.copies, 1, 1)
        window.put(x, whole)
        return whole

    def _push_mlp(self, layer: int) -> Callable[[Tensor], Tensor | None]:
        scale = self.model.mlp_scale(layer)
        ablated, everywhere = self.side.values.mlps[layer], self.reach.mlps[layer]

        def fn(value: Tensor) -> Tensor | None:
            apart = self.model.layers[layer].mlp_apart
            if not apart:
                value = self.windows.of(everywhere).take(value)
            self._push(value * scale, ablated, everywhere)
            # Nobody reads the stream itself, which has all tokens.
            size = (len(value), *ablated.shape[1:])
            return value.new_zeros(size) if apart else None

        return fn

    def _final(self, _: Tensor) -> Tensor:
        base, everywhere = self.side.final, self.positions is None
        x = self._input([self.wiring.logits], base, everywhere)[0]
        return self._spread(x, base, self.windows.of(everywhere))


def _active_senders(model: Backend, kept: np.ndarray) -> np.ndarray:
    """Senders that a kept edge leaves, in canonical order."""
    return np.flatnonzero(kept.any(1) & model.shape.edge_mask.any(1))


def run_circuits(
    model: Backend,
    batch: TokenBatch,
    side: AblatedSide,
    masks: Tensor | Sequence[np.ndarray],
    *,
    positions: Tensor | None = None,
) -> Tensor:
    """Run K circuits on one chunk; logits `[circuit, example, …]`.

    `masks` bool (or gates, float, maybe requiring grad) `[circuit, sender, receiver]`.
    `positions` int64 `[example]` unembeds one position: `[circuit, example, 1,
    d_vocab]`; None gives `[circuit, example, pos, d_vocab]`. Where a gate is neither 0
    nor 1 its edge carries `gate · current + (1 − gate) · ablated`.
    """
    gates = torch.as_tensor(np.stack(masks)) if not isinstance(masks, Tensor) else masks
    gates = gates.to(model.device)
    with torch.set_grad_enabled(gates.requires_grad):
        found = CircuitPass(model, batch, side, gates, positions).run()
    return found.unflatten(0, (len(gates), -1))
