"""The taps of one pass that computes some components of K circuits.

A `Plan` says which components are computed and a `Reach` at which tokens; `Values` give
each receiver its input, assembled apart from all others, and keep what senders add. The
model's own residual stream is read by nobody: what a pass leaves in it means nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablated_side import AblatedSide
from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.senders import head_writes
from circuitlab.sites import PORTS
from circuitlab.windows import Windows
from circuitlab.wiring import Plan, Reach, Wiring


@dataclass(frozen=True)
class Chunk:
    """Some examples, ready to run circuits on: the clean batch, the ablated side, and
    which position of each is unembedded (int64 `[example]`; None: all)."""

    batch: TokenBatch
    side: AblatedSide
    positions: Tensor | None


class Values(Protocol):
    """What a pass computes from, and what becomes of it. Rows are the examples, circuit
    by circuit; tensors hold a window's tokens: `everywhere` says which (`Windows.of`)."""

    def inputs(self, columns: Sequence[int], everywhere: bool) -> Tensor:
        """Inputs of receivers that share a site, `[receiver, row, pos, d_model]`."""
        ...

    def keep(self, senders: np.ndarray, change: Tensor, everywhere: bool) -> None:
        """Take what senders add beyond their ablated values, `[sender, row, pos,
        d_model]`; `change` comes in canonical order of the senders."""
        ...

    def port(self, layer: int, port: str) -> Tensor:
        """A port's output as it stands, `[example, pos, head, d_head]`."""
        ...

    def keep_port(self, layer: int, port: str, found: Tensor) -> None:
        """Take the outputs of the plan's heads of a port, `[row, pos, head, d_head]`."""
        ...


@dataclass(frozen=True)
class CircuitPass:
    """One pass of `copies` circuits over one chunk.

    `stream`: whether the embedding's value is taken too.
    """

    model: Backend
    chunk: Chunk
    wiring: Wiring
    plan: Plan
    reach: Reach
    windows: Windows
    values: Values
    copies: int
    stream: bool = False

    def run(self, *, grad: bool = False) -> Tensor:
        """Logits `[circuit, example, …]`."""
        rows, positions = self.chunk.batch.repeat(self.copies), self.chunk.positions
        if positions is not None:
            positions = positions.repeat(self.copies)
        logits = self.model.run(rows, self._taps(), grad=grad, positions=positions)
        return logits.unflatten(0, (self.copies, -1))

    def _taps(self) -> list[Tap]:
        taps = [Tap(self.model.stream, self._push_stream)] if self.stream else []
        for layer in range(self.model.shape.n_layers):
            if not self.plan.touches(layer):
                taps.append(self.model.bypass(layer))
                continue
            taps += self._attention_taps(layer)
            taps += self._mlp_taps(layer)
        return [*taps, Tap(self.model.final_stream, self._final)]

    def _push(
        self, sender: int, value: Tensor, ablated: Tensor, everywhere: bool
    ) -> None:
        """Keep what a sender's value `[row, pos, d_model]`, at its window, adds."""
        change = value.unflatten(0, (self.copies, -1))
        change = change - self.windows.of(everywhere).take(ablated)
        self.values.keep(np.array([sender]), change.flatten(0, 1)[None], everywhere)

    def _push_stream(self, stream: Tensor) -> None:
        everywhere = self.reach.stream
        value = self.windows.of(everywhere).take(stream)
        self._push(0, value, self.chunk.side.values.stream, everywhere)

    # --- attention ---

    def _attention_taps(self, layer: int) -> list[Tap]:
        sites = self.model.layers[layer]
        if layer not in self.plan.heads:
            path = sites.q.path.rpartition(".")[0]
            return [Tap(Site(path, "instead"), _no_attention)]  # type: ignore[arg-type]
        taps = [
            Tap(Site(getattr(sites, port).path, "instead"), self._port(layer, port))
            for port in PORTS
        ]
        if not self.model.shape.split_heads:
            assert sites.attention_post is not None
            return [*taps, Tap(Site(sites.attention_post), self._push_whole(layer))]
        if sites.attention_post is None:
            project = Site(sites.attention_out.path, "instead")
            return [*taps, Tap(project, self._push_heads(layer))]
        seen: list[Tensor] = []
        scaled = Tap(sites.attention_out, self._push_scaled(layer, seen))
        return [*taps, Tap(sites.z, seen.append), scaled]

    def _port(self, layer: int, port: str) -> Callable[[Tensor], Tensor]:
        """A port's output for every circuit; heads outside the plan keep theirs."""
        columns = self.plan.ports.get((layer, port))
        everywhere = self.reach.of(layer, port)

        def fn(_: Tensor) -> Tensor:
            out = self.values.port(layer, port).repeat(self.copies, 1, 1, 1)
            if columns is not None:
                heads = self.wiring.places(layer, port, columns)
                x = self.values.inputs(columns.tolist(), everywhere)
                found = self._project(layer, port, heads, x)
                self.windows.of(everywhere).put(found, out, heads)
                self.values.keep_port(layer, port, found)
            return out.flatten(2)

        return fn

    def _project(self, layer: int, port: str, heads: list[int], x: Tensor) -> Tensor:
        """Outputs of some of a port's heads, `[row, pos, head, d_head]`."""
        normed = self.model.norm(layer, "attention")(x)
        weight, bias = self.model.projection(layer, port)
        out = torch.bmm(normed.flatten(1, 2), weight[heads].transpose(1, 2))
        out = out.unflatten(1, x.shape[1:3]).permute(1, 2, 0, 3)
        return out if bias is None else out + bias[heads]

    def _push_heads(self, layer: int) -> Callable[[Tensor], Tensor]:
        def fn(z: Tensor) -> Tensor:
            self._push_z(layer, z.unflatten(-1, (self.model.shape.n_heads, -1)))
            return z.new_zeros(*z.shape[:2], self.model.shape.d_model)

        return fn

    def _push_scaled(self, layer: int, seen: list[Tensor]) -> Callable[[Tensor], None]:
        def fn(out: Tensor) -> None:
            r = self.model.post_scale(layer, out)
            assert r is not None
            z = seen.pop().unflatten(-1, (self.model.shape.n_heads, -1))
            self._push_z(layer, z * r[..., None])

        return fn

    def _push_z(self, layer: int, heads: Tensor) -> None:
        senders, everywhere = self.plan.heads[layer], self.reach.heads[layer]
        own = (senders - self.wiring.heads[layer][0]).tolist()
        take = self.windows.of(everywhere).take
        now = take(heads)[:, :, own].unflatten(0, (self.copies, -1))
        change = now - take(self.chunk.side.values.heads[layer])[:, :, own]
        wrote = head_writes(self.model, layer, change.flatten(0, 1), own)
        self.values.keep(senders, wrote, everywhere)

    def _push_whole(self, layer: int) -> Callable[[Tensor], None]:
        sender, everywhere = int(self.wiring.heads[layer][0]), self.reach.heads[layer]
        ablated = self.chunk.side.values.heads[layer][:, :, 0]

        def fn(value: Tensor) -> None:
            value = self.windows.of(everywhere).take(value)
            self._push(sender, value, ablated, everywhere)

        return fn

    # --- MLP and logits ---

    def _mlp_taps(self, layer: int) -> list[Tap]:
        sites = self.model.layers[layer]
        if sites.mlp_in is None or sites.mlp_out is None:
            return []
        if layer not in self.plan.mlps:
            if sites.mlp_in.path.endswith(".mlp"):
                return [Tap(Site(sites.mlp_in.path, "instead"), torch.zeros_like)]
            return []
        return [
            Tap(sites.mlp_in, self._mlp_input(layer)),
            Tap(sites.mlp_out, self._push_mlp(layer)),
        ]

    def _mlp_input(self, layer: int) -> Callable[[Tensor], Tensor]:
        column = int(self.wiring.columns[layer, "in"][0])
        everywhere = self.reach.mlps[layer]

        def fn(_: Tensor) -> Tensor:
            if self.model.layers[layer].mlp_apart:
                x = self.values.inputs([column], everywhere)[0]
            else:
                x = self._whole(column, everywhere)
            return self.model.norm(layer, "mlp")(x)

        return fn

    def _push_mlp(self, layer: int) -> Callable[[Tensor], Tensor | None]:
        sender, everywhere = int(self.wiring.mlps[layer][0]), self.reach.mlps[layer]
        scale = self.model.mlp_scale(layer)
        ablated = self.chunk.side.values.mlps[layer]

        def fn(value: Tensor) -> Tensor | None:
            apart = self.model.layers[layer].mlp_apart
            if not apart:
                value = self.windows.of(everywhere).take(value)
            self._push(sender, value * scale, ablated, everywhere)
            # The stream that goes on has all tokens.
            size = (len(value), *ablated.shape[1:])
            return value.new_zeros(size) if apart else None

        return fn

    def _final(self, _: Tensor) -> Tensor:
        return self._whole(self.wiring.logits, self.chunk.positions is None)

    def _whole(self, column: int, everywhere: bool) -> Tensor:
        """A receiver's input at all tokens, `[row, pos, d_model]`: what is not in its
        window is as if every edge were cut."""
        whole = self.chunk.side.seen_by(column).repeat(self.copies, 1, 1)
        x = self.values.inputs([column], everywhere)[0]
        self.windows.of(everywhere).put(x, whole)
        return whole


def _no_attention(value: Tensor) -> tuple[Tensor, None]:
    """Stands in for an attention module that is not run; blocks unpack a pair."""
    return torch.zeros_like(value), None
