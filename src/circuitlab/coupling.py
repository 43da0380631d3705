"""Whether heads act on each other within a layer: a fact about a model, found by running.

Where they do, what one head adds depends on the others' inputs, so that a layer's heads
must be run together.
"""

from __future__ import annotations

import torch
from torch import Tensor

from circuitlab.backends import Backend, Tap, TokenBatch


def heads_are_coupled(model: Backend) -> bool:
    """Whether one head's input moves what another head of its layer adds.

    It does under a post-norm, whose scale is the layer's, and where queries or keys are
    normalised across heads. Found by moving one head and looking at the others.
    """
    return model.remembered("heads_are_coupled", lambda: _coupled(model))


def _coupled(model: Backend) -> bool:
    shape = model.shape
    if not shape.split_heads:
        return False
    if any(sites.attention_post for sites in model.layers):
        return True
    batch = model.batch([[i % shape.d_vocab for i in range(1, 6)]])
    plain = _z_with(model, batch, None)
    for port, heads in (("q", shape.n_heads), ("k", shape.n_kv_heads)):
        per_group = shape.n_heads // heads
        moved = _z_with(model, batch, port)
        if not torch.equal(plain[:, :, per_group:], moved[:, :, per_group:]):
            return True
    return False


def _z_with(model: Backend, batch: TokenBatch, port: str | None) -> Tensor:
    """Layer 0's z `[example, pos, head, d_head]`, with one port's first head moved."""
    seen: list[Tensor] = []
    sites = model.layers[0]
    taps = [Tap(sites.z, lambda z: seen.append(z.unflatten(-1, (-1, d_head))))]
    d_head = model.shape.d_head

    def move(value: Tensor) -> Tensor:
        moved = value.clone()
        moved[..., :d_head] = moved[..., :d_head] * 1.5 + 1.0
        return moved

    if port is not None:
        taps.append(Tap(getattr(sites, port), move))
    model.run(batch, taps)
    return seen[0]
