"""Run circuits: every edge outside carries its ablated value, receiver by receiver.

Every receiver's input is assembled apart, so an edge can be cut for one receiver and
kept for another:

    x_v = (ablated stream at v) + Σ over kept edges u→v of (current_u − ablated_u)

The ablated stream is built once per chunk of prompts; what is kept is added back, so a
sparse circuit costs little beyond its forward. K circuits run as K copies of the rows.
Components that no kept edge leaves are not computed at all.

Masks may be floating gates in [0, 1]; then the run is differentiable in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.coupling import heads_are_coupled
from circuitlab.senders import SenderValues, constant_writes, head_writes
from circuitlab.sites import PORTS, fed_by


@dataclass(frozen=True)
class AblatedSide:
    """The fully ablated run of one chunk, from compact sender values.

    `attention`, `mlp` and `final` are the pre-norm streams `[example, pos, d_model]`
    that receivers would see with every edge cut.
    """

    model: Backend
    values: SenderValues
    attention: tuple[Tensor, ...]
    mlp: tuple[Tensor, ...]
    final: Tensor

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


def ablated_side(
    model: Backend, values: SenderValues | None, batch: TokenBatch
) -> AblatedSide:
    """Sum the ablated senders into the streams; None stands for zeros."""
    values = values or _zeros(model, batch)
    stream = values.stream
    attention, mlp = [], []
    for layer in range(model.shape.n_layers):
        before = stream
        attention.append(before)
        stream = before + all_heads(model, layer, values.heads[layer])
        if model.shape.has_mlp:
            mlp.append(before if model.shape.parallel else stream)
            stream = stream + values.mlps[layer]
    return AblatedSide(model, values, tuple(attention), tuple(mlp), stream)


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


class _Streams:
    """Current-minus-ablated sender differences `[sender, copy, example·pos·d_model]`,
    pushed in canonical order, and what a mask adds up of them."""

    def __init__(self, senders: np.ndarray, like: Tensor, copies: int, grad: bool):
        self.senders = senders
        self.count = 0
        self.shape = (copies, *like.shape)
        self._blocks: list[Tensor] = []
        self._buffer = None
        if not grad:
            self._buffer = like.new_empty(len(senders), copies, like.numel())

    def push(self, block: Tensor) -> None:
        """Add differences `[sender, copy·example, pos, d_model]`."""
        flat = block.reshape(len(block), self.shape[0], -1)
        if self._buffer is None:
            self._blocks.append(flat)
        else:
            self._buffer[self.count : self.count + len(block)] = flat
        self.count += len(block)

    def add(self, mask: Tensor, base: Tensor) -> Tensor:
        """`base + mask · differences`: `[receiver, copy, example, pos, d_model]`.

        `mask` is `[copy, receiver, active sender]`; `base` `[example, pos, d_model]`.
        """
        shape = (mask.shape[1], *self.shape)
        if self.count == 0:
            return base.expand(shape)
        seen, mask = self._seen(), mask[:, :, : self.count]
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

    `masks` `[circuit, sender, receiver]`, bool or gates.
    """

    def __init__(
        self, model: Backend, batch: TokenBatch, side: AblatedSide, masks: Tensor
    ):
        self.model = model
        self.batch = batch
        self.side = side
        self.copies = len(masks)
        self.grad = masks.requires_grad
        masks = masks * torch.as_tensor(model.shape.edge_mask, device=masks.device)
        gates = masks.detach() != 0
        self.active = _active_senders(model, gates.any(0).cpu().numpy())
        self.masks = masks.to(model.dtype).transpose(1, 2)[:, :, self.active]
        self._kept = gates.any(0)[self.active].any(0).cpu().numpy()
        self.streams = _Streams(self.active, side.final, self.copies, self.grad)
        self._feeding = _feeding(model)
        self._coupled = heads_are_coupled(model)

    def run(self, positions: Tensor | None) -> Tensor:
        """Logits `[circuit·example, …]`; `positions` as in `Backend.run`."""
        rows = self.batch.repeat(self.copies)
        if positions is not None:
            positions = positions.repeat(self.copies, *[1] * (positions.ndim - 1))
        return self.model.run(rows, self._taps(), grad=self.grad, positions=positions)

    def _taps(self) -> list[Tap]:
        taps = [Tap(self.model.stream, self._push_stream)]
        for layer, sites in enumerate(self.model.layers):
            heads = self._own(layer, "head")
            mlp = self._own(layer, "mlp")
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

    def _own(self, layer: int, kind: str) -> np.ndarray:
        """Active senders of one layer's kind, as sender indices."""
        rows = self.model.shape.rows(layer, kind)
        return rows[np.isin(rows, self.active)]

    def _push_stream(self, stream: Tensor) -> None:
        if len(self.active) and self.active[0] == 0:
            one = stream[: len(self.batch)] - self.side.values.stream
            self.streams.push(one[None].repeat(1, self.copies, 1, 1))

    # --- attention ---

    def _port(self, layer: int, port: str) -> Callable[[Tensor], Tensor]:
        """A port's output for every copy; cut heads carry their ablated one."""

        def fn(_: Tensor) -> Tensor:
            ablated = self.side.projections[layer, port]
            columns = self.model.shape.columns(layer, port)
            heads = [i for i, c in enumerate(columns) if self._needed(int(c))]
            out = ablated.repeat(self.copies, 1, 1, 1)
            if heads:
                out[:, :, heads] = self._project(layer, port, heads, columns[heads])
            return out.flatten(2)

        return fn

    def _needed(self, column: int) -> bool:
        if self._coupled:
            # A head that nothing reads still moves what the others add.
            return bool(self._kept[column])
        return bool(self._kept[column]) and bool(
            np.isin(self._feeding[column], self.active).any()
        )

    def _project(self, layer: int, port: str, heads: list[int], columns) -> Tensor:
        base = self.side.attention[layer]
        x = self.streams.add(self.masks[:, columns], base)
        normed = self.model.norm(layer, "attention")(x).flatten(1, 3)
        weight, bias = self.model.projection(layer, port)
        out = torch.bmm(normed, weight[heads].transpose(1, 2))
        out = out.unflatten(1, (-1, base.shape[1])).permute(1, 2, 0, 3)
        return out if bias is None else out + bias[heads]

    def _attention_taps(self, layer: int, heads: np.ndarray) -> list[Tap]:
        sites = self.model.layers[layer]
        shape = self.model.shape
        if not shape.split_heads:
            assert sites.attention_post is not None
            push = self._push_whole(layer, heads)
            return [Tap(Site(sites.attention_post), push)]
        own = (heads - shape.rows(layer, "head")[0]).tolist()
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
        ablated = self.side.values.heads[layer]
        change = heads.unflatten(0, (self.copies, -1)) - ablated
        change = change.flatten(0, 1)[:, :, own]
        self.streams.push(head_writes(self.model, layer, change, own))

    def _push_whole(self, layer: int, heads: np.ndarray) -> Callable[[Tensor], None]:
        def fn(value: Tensor) -> None:
            if len(heads):
                ablated = self.side.values.heads[layer][:, :, 0]
                change = value.unflatten(0, (self.copies, -1)) - ablated
                self.streams.push(change.flatten(0, 1)[None])

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
        def fn(_: Tensor) -> Tensor:
            columns = self.model.shape.columns(layer, "in")
            x = self.streams.add(self.masks[:, columns], self.side.mlp[layer])
            return self.model.norm(layer, "mlp")(x[0].flatten(0, 1))

        return fn

    def _push_mlp(self, layer: int) -> Callable[[Tensor], None]:
        scale = self.model.mlp_scale(layer)

        def fn(value: Tensor) -> None:
            change = (value * scale).unflatten(0, (self.copies, -1))
            change = change - self.side.values.mlps[layer]
            self.streams.push(change.flatten(0, 1)[None])

        return fn

    def _final(self, _: Tensor) -> Tensor:
        column = [self.model.shape.receiver_index["logits"]]
        x = self.streams.add(self.masks[:, column], self.side.final)
        return x[0].flatten(0, 1)


def _active_senders(model: Backend, kept: np.ndarray) -> np.ndarray:
    """Senders that a kept edge leaves, in canonical order."""
    return np.flatnonzero(kept.any(1) & model.shape.edge_mask.any(1))


def _feeding(model: Backend) -> list[np.ndarray]:
    """For each receiver, the sender indices computed from its input."""
    index = model.shape.sender_index
    return [
        np.array([index[c.name] for c in fed_by(receiver, model.shape)], dtype=np.int64)
        for receiver in model.shape.receivers
    ]


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
        found = CircuitPass(model, batch, side, gates).run(positions)
    return found.unflatten(0, (len(gates), -1))
