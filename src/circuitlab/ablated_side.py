"""The run with every edge cut: what receivers see then, from ablated sender values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from circuitlab.ablations import Rows
from circuitlab.backends import Backend, TokenBatch
from circuitlab.senders import SenderValues, constant_writes
from circuitlab.sites import PORTS


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

    def seen_by(self, column: int) -> Tensor:
        """The stream that a receiver reads, `[example, pos, d_model]`."""
        receiver = self.model.shape.receivers[column]
        layer = receiver.component.layer
        if layer is None:
            return self.final
        return self.mlp[layer] if receiver.port == "in" else self.attention[layer]

    @cached_property
    def projections(self) -> dict[tuple[int, str], Tensor]:
        """Each port's output `[example, pos, head, d_head]` with every edge cut."""
        # Many passes share these: none of them owns a graph to the weights.
        with torch.no_grad():
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


@torch.no_grad()
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
