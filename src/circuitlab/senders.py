"""What each component adds to the stream, and what an ablation puts in its place.

Heads are held compactly, as z scaled by a post-norm's r, `[example, pos, head, d_head]`:
their contributions to the stream are `z · W_O`, made where they are needed. So clean,
corrupted and mean values are added and subtracted cheaply, before they are expanded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from circuitlab.backends import Backend, Site, Tap, TokenBatch


@dataclass(frozen=True)
class SenderValues:
    """Compact sender values of a batch.

    `stream` `[example, pos, d_model]` is the `input` component; `heads` per layer
    `[example, pos, head, d_head]`; `mlps` per layer `[example, pos, d_model]`.
    """

    stream: Tensor
    heads: tuple[Tensor, ...]
    mlps: tuple[Tensor, ...]

    def map(self, fn: Callable[[Tensor], Tensor]) -> SenderValues:
        """Apply a function to every tensor."""
        return SenderValues(
            fn(self.stream), tuple(map(fn, self.heads)), tuple(map(fn, self.mlps))
        )

    def combine(
        self, other: SenderValues, fn: Callable[[Tensor, Tensor], Tensor]
    ) -> SenderValues:
        """Apply a function to every pair of tensors; examples broadcast."""
        return SenderValues(
            fn(self.stream, other.stream),
            tuple(map(fn, self.heads, other.heads)),
            tuple(map(fn, self.mlps, other.mlps)),
        )

    def minus(self, other: SenderValues) -> SenderValues:
        """The difference, self − other."""
        return self.combine(other, torch.sub)

    def masked(self, mask: Tensor) -> SenderValues:
        """Zero at padded positions; `mask` is bool `[example, pos]`."""
        if bool(mask.all()):
            return self

        def zero(value: Tensor) -> Tensor:
            wide = mask.reshape(*mask.shape, *[1] * (value.ndim - 2))
            return value * wide

        return self.map(zero)


@dataclass
class Collector:
    """Taps that collect one pass's sender values, detached."""

    model: Backend
    _stream: Tensor | None = None
    _z: dict[int, Tensor] = field(default_factory=dict)
    _heads: dict[int, Tensor] = field(default_factory=dict)
    _mlps: dict[int, Tensor] = field(default_factory=dict)

    def taps(self) -> list[Tap]:
        found = [Tap(self.model.stream, self._take_stream)]
        for i, layer in enumerate(self.model.layers):
            if not self.model.shape.split_heads:
                assert layer.attention_post is not None
                found.append(Tap(Site(layer.attention_post), self._whole(i)))
            else:
                found.append(Tap(layer.z, self._take_z(i)))
            if layer.attention_post and self.model.shape.split_heads:
                found.append(Tap(layer.attention_out, self._take_scale(i)))
            if layer.mlp_out:
                found.append(Tap(layer.mlp_out, self._take_mlp(i)))
        return found

    def values(self) -> SenderValues:
        """What the pass collected."""
        assert self._stream is not None
        order = range(len(self.model.layers))
        return SenderValues(
            self._stream,
            tuple(self._heads[i] for i in order),
            tuple(self._mlps[i] for i in order) if self._mlps else (),
        )

    def _take_stream(self, value: Tensor) -> None:
        self._stream = value.detach()

    def _take_z(self, layer: int) -> Callable[[Tensor], None]:
        def take(value: Tensor) -> None:
            heads = (self.model.shape.n_heads, -1)
            self._heads[layer] = value.detach().unflatten(-1, heads)

        return take

    def _whole(self, layer: int) -> Callable[[Tensor], None]:
        def take(value: Tensor) -> None:
            self._heads[layer] = value.detach()[:, :, None]

        return take

    def _take_scale(self, layer: int) -> Callable[[Tensor], None]:
        def take(value: Tensor) -> None:
            r = self.model.post_scale(layer, value.detach())
            assert r is not None
            self._heads[layer] = self._heads[layer] * r[..., None]

        return take

    def _take_mlp(self, layer: int) -> Callable[[Tensor], None]:
        scale = self.model.mlp_scale(layer)

        def take(value: Tensor) -> None:
            value = value.detach()
            self._mlps[layer] = value if scale == 1.0 else value * scale

        return take


def collect(
    model: Backend, batch: TokenBatch, positions: Tensor | None = None
) -> tuple[SenderValues, Tensor]:
    """Run once without gradients; return the sender values and the logits."""
    collector = Collector(model)
    logits = model.run(batch, collector.taps(), positions=positions)
    return collector.values(), logits


@torch.no_grad()
def expand(model: Backend, values: SenderValues, first: int, stop: int) -> Tensor:
    """Contributions of the senders `first` to `stop` − 1 (in canonical order),
    `[sender, example, pos, d_model]`."""
    shape = model.shape
    out = values.stream.new_empty(stop - first, *values.stream.shape)
    if first == 0:
        out[0] = values.stream
    for layer in range(shape.n_layers):
        own = shape.rows(layer, "head")
        low, high = max(int(own[0]), first), min(int(own[-1]) + 1, stop)
        if low < high:
            which = slice(low - int(own[0]), high - int(own[0]))
            part = values.heads[layer][:, :, which]
            head_writes(model, layer, part, which, out=out[low - first : high - first])
        if shape.has_mlp:
            row = int(shape.rows(layer, "mlp")[0])
            if first <= row < stop:
                out[row - first] = values.mlps[layer]
    return out


def head_writes(
    model: Backend,
    layer: int,
    heads: Tensor,
    which: slice | list[int] = slice(None),
    *,
    out: Tensor | None = None,
) -> Tensor:
    """What heads add to the stream: `[example, pos, head, d_head]` → `[head, example,
    pos, d_model]`. `which` says which of the layer's heads they are."""
    by_head = heads.permute(2, 0, 1, 3)
    if not model.shape.split_heads:
        return by_head if out is None else out.copy_(by_head)
    weight = model.output_projection(layer)[0][which]
    flat = None if out is None else out.flatten(1, 2)
    written = torch.bmm(by_head.flatten(1, 2), weight, out=flat)
    return written.unflatten(1, by_head.shape[1:3])


def constant_writes(model: Backend, layer: int) -> Tensor | None:
    """The attention output bias: it belongs to no component, and no ablation moves it."""
    if not model.shape.split_heads:
        return None
    return model.output_projection(layer)[1]


def repeated(values: SenderValues, copies: int) -> SenderValues:
    """The same examples `copies` times, copy by copy."""
    return values.map(lambda value: value.repeat(copies, *[1] * (value.ndim - 1)))


def sliced(values: SenderValues, rows: slice) -> SenderValues:
    """Some of the examples."""
    return values.map(lambda value: value[rows])
