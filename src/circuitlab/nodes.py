"""Node and neuron scores: how much the metric changes when a component is corrupted.

    score(u)    = Σ over positions and features of (ablated_u − clean_u) · ∂M/∂u
    score(u, i) = the same, of feature i of what u adds to the stream alone

where ∂M/∂u, the total gradient at what `u` adds, is the sum of the gradients at the
inputs of all its receivers. So a node's score is the sum of the scores of the edges that
leave it, and both come from the passes that edge scores need. Node attribution patching
(Nanda 2023) with the sign, points and ablations of `edge_scores`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from circuitlab import methods
from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.backends import Backend, Capability, as_backend, require
from circuitlab.errors import ArgumentError, require_count
from circuitlab.methods import EAP, EAPIG, CleanCorrupted
from circuitlab.metrics import Metric, check_metric
from circuitlab.prompts import Prompts
from circuitlab.receivers import GradientSum
from circuitlab.score_sum import Chunk, chunk_size, moments
from circuitlab.senders import expand

MEMORY_BUDGET = 2 << 30
"""Bytes that a chunk's gradients may take, by default."""


def node_scores(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    *,
    method: EAP | EAPIG | CleanCorrupted | None = None,
    ablation: Ablation | str = "patch",
    neurons: bool = False,
    batch_size: int | None = None,
    memory_budget: int = MEMORY_BUDGET,
) -> pa.Table:
    """Score every sender, or with `neurons` every feature of what every sender adds.

    Returns columns component, kind, layer, head, neuron (null for nodes), score, stderr,
    n, in canonical order: means over examples in the metric's units, with the sign of
    `edge_scores`. `method` is EAP() unless given.

    Raises ArgumentError `method_unsupported` (see `check_method`), and what
    `edge_scores` raises.
    """
    method = EAP() if method is None else method
    check_method(method, metric)
    model = as_backend(model)
    (stage,) = method.stages(model.shape)
    require(model, Capability.GRADIENTS)
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    budget = require_count("memory_budget_invalid", "memory_budget", memory_budget)
    size = batch_size
    if size is None:
        size = chunk_size(model, prompts, budget, "site")
    sums = _NodeSum(model, neurons)
    with model.frozen():
        for rows in source.chunks(size):
            chunk = Chunk(model, rows, source, metric)
            sums.add(chunk, chunk.gradients(stage))
    return sums.rows()


def check_method(method: Any, metric: Metric) -> None:
    """Refuse what can't score nodes: exact effects, EAP's correction of queries and keys,
    and paths through activations, all of which are of edges.

    Raises ArgumentError `method_unsupported`, `method_unknown`, `metric_invalid`,
    `metric_stationary_at_clean`.
    """
    check_metric(metric)
    methods.check_method(method, metric)
    of_edges = method.name == "exact" or getattr(method, "qk_correction", False)
    if of_edges or getattr(method, "path", "inputs") != "inputs":
        raise ArgumentError(
            "method_unsupported",
            f"{method} scores edges alone; node scores take one gradient for all senders: "
            'EAP(), CleanCorrupted() or EAPIG(path="inputs")',
            value=repr(method),
            expected=["EAP()", "EAPIG(path='inputs')", "CleanCorrupted()"],
        )


@dataclass
class _NodeSum:
    """Sums over examples, float64, `[sender]` or `[sender, feature]`."""

    model: Backend
    neurons: bool
    n: int = 0
    totals: list[np.ndarray] = field(default_factory=list)
    squares: list[np.ndarray] = field(default_factory=list)

    def add(self, chunk: Chunk, gradients: GradientSum) -> None:
        found = list(self._per_example(chunk, gradients))[::-1]
        per_example = np.concatenate(found)
        totals, squares = per_example.sum(1), np.square(per_example).sum(1)
        self.totals.append(totals)
        self.squares.append(squares)
        self.n += per_example.shape[1]

    def _per_example(
        self, chunk: Chunk, gradients: GradientSum
    ) -> Iterator[np.ndarray]:
        """Scores `[sender, example(, feature)]`, last senders first."""
        shape = self.model.shape
        inputs = _layer_gradients(gradients, chunk.difference.stream)
        total = inputs["logits"]
        for layer in reversed(range(shape.n_layers)):
            if shape.has_mlp:
                yield self._times(chunk, shape.rows(layer, "mlp"), total)
            reads = inputs[layer, "in"] if shape.has_mlp else torch.zeros_like(total)
            heads = total if shape.parallel else total + reads
            yield self._times(chunk, shape.rows(layer, "head"), heads)
            total = total + reads + inputs[layer, "attention"]
        yield self._times(chunk, np.array([0]), total)

    def _times(self, chunk: Chunk, rows: np.ndarray, gradient: Tensor) -> np.ndarray:
        added = expand(self.model, chunk.difference, int(rows[0]), int(rows[-1]) + 1)
        product = (added * gradient).sum(2).double()
        return (product if self.neurons else product.sum(-1)).cpu().numpy()

    def rows(self) -> pa.Table:
        """The table; see `node_scores`."""
        mean, stderr = moments(sum(self.totals), sum(self.squares), self.n)  # type: ignore[arg-type]
        senders = self.model.shape.senders
        width = mean.shape[1] if self.neurons else 1
        each = [sender for sender in senders for _ in range(width)]
        neuron = (
            list(range(width)) * len(senders) if self.neurons else [None] * len(each)
        )
        return pa.table(
            {
                "component": [sender.name for sender in each],
                "kind": [sender.kind for sender in each],
                "layer": pa.array([sender.layer for sender in each], pa.int32()),
                "head": pa.array([sender.head for sender in each], pa.int32()),
                "neuron": pa.array(neuron, pa.int32()),
                "score": mean.ravel(),
                "stderr": pa.nulls(len(each), pa.float64())
                if stderr is None
                else stderr.ravel(),
                "n": pa.array([self.n] * len(each), pa.int64()),
            }
        )


def _layer_gradients(gradients: GradientSum, like: Tensor) -> dict[Any, Tensor]:
    """Gradients at receivers' inputs `[example, pos, d_model]`, summed per layer's
    attention, per MLP, and at the logits; zero where nothing is reached."""
    shape = gradients.model.shape
    found: dict[Any, Tensor] = {"logits": torch.zeros_like(like)}
    for layer in range(shape.n_layers):
        found[layer, "attention"] = torch.zeros_like(like)
        found[layer, "in"] = torch.zeros_like(like)
    for group in gradients.groups():
        for column, gradient in zip(group.columns, group.gradient, strict=True):
            receiver = shape.receivers[int(column)]
            if group.positions is not None:
                index = group.positions[..., None].expand(-1, -1, like.shape[-1])
                found["logits"].scatter_add_(1, index, gradient)
            elif receiver.component.kind == "logits":
                found["logits"] += gradient
            else:
                port = "in" if receiver.port == "in" else "attention"
                found[receiver.component.layer, port] += gradient
    return found
