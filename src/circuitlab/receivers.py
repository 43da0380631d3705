"""Receiver gradients: the two edge-seeded reads of one evaluation point.

One backward, seeded with the metric at the unembedding output, reads every receiver
group at its own output: the q, k and v projections' outputs, the MLP's normed input (on
a branch of its own, since one norm may feed attention too), and the final norm's output.
A second read pulls each group back to its pre-norm input: in closed form, because the
norms are known (`norms.py`; a test holds it equal to autograd).

Over several points (EAP-IG) what is summed stays small: r·dq per head `[.., d_head]`,
and per point x̂ with one number per head, so that the map to d_model runs only once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import Backend, Tap, TokenBatch
from circuitlab.errors import ArgumentError, ModelError
from circuitlab.gradients import gradients_at
from circuitlab.metrics import Metric
from circuitlab.norms import Norm
from circuitlab.sites import PORTS

RECEIVERS_AT_ONCE = 128
"""How many receivers one score product takes, where there are as many."""


@dataclass
class _PortSum:
    """Sum over points of one port's cotangents: r·dq and the rank-one norm terms."""

    cotangent: Tensor | None = None
    along: list[Tensor] = field(default_factory=list)
    normed: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Group:
    """Gradients at the pre-norm inputs of receivers that share one site.

    `columns` are receiver indices, `gradient` `[receiver, example, pos, d_model]`;
    `positions` int64 `[example, pos]` where only some positions are held, else None.
    """

    columns: np.ndarray
    gradient: Tensor
    positions: Tensor | None = None


class GradientSum:
    """Accumulates receiver gradients over the points of one chunk of examples.

    Positions before `start` are left out: no sender differs there.
    """

    def __init__(self, model: Backend, metric: Metric, start: int = 0):
        self.model = model
        self.metric = metric
        self.start = start
        self.unreachable: set[int] = set()
        self._ports: dict[tuple[int, str], _PortSum] = {}
        self._mlps: dict[int, Tensor] = {}
        self._logits: Tensor | None = None
        self._positions: Tensor | None = None

    def add(
        self, batch: TokenBatch, taps: Sequence[Tap] = (), weight: float = 1.0
    ) -> Tensor:
        """Run one point with `taps`, add its receiver gradients times `weight`.

        Returns the metric per example, detached. The pass must start from a leaf at the
        stream (`leaf_tap`). Raises ArgumentError `metric_ignores_logits`, ModelError
        `model_without_gradients`.
        """
        seen = _Seen(self.model)
        positions = batch.last if self.metric.positions == "last" else None
        logits = self.model.run(
            batch, [*taps, *seen.taps()], grad=True, positions=positions
        )
        values = self.metric(logits, batch)
        gradients = _backward(values, seen, logits)
        self._positions = None if positions is None else positions[:, None] - self.start
        with torch.no_grad():
            self._take(seen, gradients, weight)
        return values.detach()

    def _take(self, seen: _Seen, gradients: dict, weight: float) -> None:
        for layer in range(self.model.shape.n_layers):
            norm = self.model.norm(layer, "attention")
            statistics = None
            for port in PORTS:
                gradient = gradients.get((layer, port))
                if gradient is None:
                    self._miss(layer, port)
                    continue
                if statistics is None:
                    statistics = norm.statistics(self._late(seen.stream[layer]))
                out = self._late(seen.tensors[layer, port])
                gradient = self._late(gradient) * weight
                self._take_port(layer, port, gradient, out, norm, statistics)
            if self.model.shape.has_mlp:
                self._take_mlp(seen, layer, gradients.get((layer, "in")), weight)
        self._take_logits(seen, gradients.get("logits"), weight)

    def _take_port(self, layer, port, gradient, out, norm: Norm, statistics) -> None:
        found = self._ports.setdefault((layer, port), _PortSum())
        weight, bias = self.model.projection(layer, port)
        normed, r = statistics
        dq = gradient.unflatten(-1, weight.shape[:2])
        if norm.kind != "none":
            # x̂·(W'ᵀ dq) = (W γx̂)·dq: the projection's own output, less its constants.
            constant = norm.constant_through(weight)
            constant = constant if bias is None else constant + bias
            inner = out.unflatten(-1, weight.shape[:2]) - constant
            along = (inner * dq).sum(-1) * (r / normed.shape[-1])
            found.along.append(along)
            found.normed.append(normed)
            dq = dq * r[..., None]
        found.cotangent = dq if found.cotangent is None else found.cotangent + dq

    def _take_mlp(self, seen: _Seen, layer: int, gradient, weight: float) -> None:
        if gradient is None:
            self._miss(layer, "in")
            return
        norm = self.model.norm(layer, "mlp")
        stream = self._late(seen.mlp_stream[layer])
        pulled = norm.pull(self._late(gradient) * weight, stream)
        before = self._mlps.get(layer)
        self._mlps[layer] = pulled if before is None else before + pulled

    def _take_logits(self, seen: _Seen, gradient, weight: float) -> None:
        if gradient is None:
            self.unreachable.add(self.model.shape.receiver_index["logits"])
            return
        stream, gradient = self._late(seen.final), self._late(gradient)
        if self._positions is not None:
            index = self._positions[..., None].expand(-1, -1, stream.shape[-1])
            stream, gradient = stream.gather(1, index), gradient.gather(1, index)
        pulled = self.model.final_norm().pull(gradient * weight, stream)
        self._logits = pulled if self._logits is None else self._logits + pulled

    def _late(self, value: Tensor) -> Tensor:
        return value.detach()[:, self.start :]

    def _miss(self, layer: int, port: str) -> None:
        self.unreachable.update(self.model.shape.columns(layer, port).tolist())

    @torch.no_grad()
    def groups(self) -> Iterator[Group]:
        """Yield the gradients at the receivers' pre-norm inputs, in order.

        Several layers make one group: matrix products want many receivers at once. A
        group's gradient is overwritten by the next one.
        """
        shape = self.model.shape
        per_layer = len(shape.columns(0, "q")) + 2 * shape.n_kv_heads + 1
        step = max(1, RECEIVERS_AT_ONCE // per_layer)
        buffer = self._buffer(min(step, shape.n_layers) * per_layer)
        for first in range(0, shape.n_layers, step):
            layers = range(first, min(first + step, shape.n_layers))
            parts = [part for layer in layers for part in self._parts(layer)]
            if parts:
                yield self._group(parts, buffer)
        if self._logits is not None:
            columns = np.array([shape.receiver_index["logits"]])
            yield Group(columns, self._logits[None], self._positions)

    def _parts(self, layer: int) -> list[tuple[int, str]]:
        ports = [(layer, port) for port in PORTS if (layer, port) in self._ports]
        return [*ports, (layer, "in")] if layer in self._mlps else ports

    def _buffer(self, receivers: int) -> Tensor | None:
        """One buffer that every group is written into in turn."""
        like = next(iter([*self._mlps.values(), *self._cotangents()]), None)
        if like is None:
            return None
        return like.new_empty(receivers, *like.shape[:2], self.model.shape.d_model)

    def _group(self, parts: Sequence[tuple[int, str]], buffer: Tensor | None) -> Group:
        shape = self.model.shape
        own = [shape.columns(layer, port) for layer, port in parts]
        columns = np.concatenate(own)
        assert buffer is not None
        out = buffer[: len(columns)]
        start = 0
        for (layer, port), some in zip(parts, own, strict=True):
            stop = start + len(some)
            if port == "in":
                out[start] = self._mlps[layer]
            else:
                self._pull_port(layer, port, out[start:stop])
            start = stop
        return Group(columns, out)

    def _cotangents(self) -> list[Tensor]:
        return [p.cotangent for p in self._ports.values() if p.cotangent is not None]

    def _pull_port(self, layer: int, port: str, out: Tensor) -> None:
        """Write the port's pre-norm gradients `[head, example, pos, d_model]`."""
        found = self._ports[layer, port]
        assert found.cotangent is not None
        weight, _ = self.model.projection(layer, port)
        folded = self.model.norm(layer, "attention").fold_into(weight)
        by_head = found.cotangent.permute(2, 0, 1, 3).flatten(1, 2)
        torch.bmm(by_head, folded, out=out.view(len(out), -1, out.shape[-1]))
        for along, normed in zip(found.along, found.normed, strict=True):
            out.addcmul_(along.permute(2, 0, 1)[..., None], normed[None], value=-1)


class _Seen:
    """Taps that keep the live tensors of one differentiated pass."""

    def __init__(self, model: Backend):
        self.model = model
        self.tensors: dict = {}
        self.stream: dict[int, Tensor] = {}
        self.mlp_stream: dict[int, Tensor] = {}
        self.final: Tensor

    def taps(self) -> list[Tap]:
        found = []
        for i, layer in enumerate(self.model.layers):
            found.append(Tap(layer.attention_stream, self._keep(self.stream, i)))
            found += [
                Tap(getattr(layer, port), self._keep(self.tensors, (i, port)))
                for port in PORTS
            ]
            if layer.mlp_stream and layer.mlp_in:
                found.append(Tap(layer.mlp_stream, self._keep(self.mlp_stream, i)))
                found.append(Tap(layer.mlp_in, self._branch((i, "in"))))
        found.append(Tap(self.model.final_stream, self._keep_final))
        found.append(Tap(self.model.final_out, self._keep(self.tensors, "logits")))
        return found

    def _keep(self, where: dict, key):
        def fn(value: Tensor) -> None:
            where[key] = value

        return fn

    def _keep_final(self, value: Tensor) -> None:
        self.final = value

    def _branch(self, key):
        def fn(value: Tensor) -> Tensor:
            self.tensors[key] = value.view_as(value)
            return self.tensors[key]

        return fn


def leaf_tap(model: Backend, value: Tensor | None = None) -> Tap:
    """Start gradients at the stream: from its own value, or from a given one."""

    def fn(stream: Tensor) -> Tensor:
        start = stream if value is None else value
        return start.detach().requires_grad_()

    return Tap(model.stream, fn)


def _backward(values: Tensor, seen: _Seen, logits: Tensor) -> dict:
    if not logits.requires_grad:
        raise ModelError(
            "model_without_gradients",
            "the logits carry no graph: the model cuts gradients, so nothing can be "
            "attributed; use method=Exact()",
        )
    if not values.requires_grad:
        raise ArgumentError(
            "metric_ignores_logits",
            "the metric does not depend on the logits (or detaches them), so every score "
            "would be zero; compute it from the logits it is given",
        )
    found = gradients_at(values.sum(), seen.tensors)
    if all(gradient is None for gradient in found.values()):
        raise ArgumentError(
            "metric_ignores_logits",
            "no receiver reaches the metric: it does not depend on the model's logits",
        )
    return found
