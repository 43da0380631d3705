"""Edge masks: learn which edges to keep, by gradient descent on gates.

Every edge gets a stochastic gate from the hard-concrete distribution (Louizos et al.
2018; used on edges by Bhaskar et al. 2024, "Edge Pruning"). A gate g lets through
`g · current + (1 − g) · ablated`. The loss is the metric's worsening plus λ times the
expected share of open gates; the circuit is the gates that end open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.backends import Capability, as_backend, require
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import Chunk, prepare
from circuitlab.circuits import SCHEMA, Circuit
from circuitlab.errors import ArgumentError
from circuitlab.metrics import Metric, kl
from circuitlab.prompts import Prompts
from circuitlab.tables import EdgeTable, Run, edge_rows, now, versions

LOW, HIGH, TEMPERATURE = -0.1, 1.1, 2 / 3
"""The hard-concrete distribution's stretch and temperature, as in Louizos et al."""


@dataclass(frozen=True)
class Training:
    """How gates are trained.

    `sparsity` λ weighs the expected share of open gates, in the metric's units: the
    larger, the fewer edges. `rate` is Adam's; `start` the chance that a gate is open at
    first. Raises ArgumentError `training_invalid`.
    """

    steps: int = 200
    sparsity: float = 1.0
    rate: float = 0.1
    start: float = 0.9
    seed: int = 0

    def __post_init__(self):
        right = {
            "steps": self.steps >= 1,
            "sparsity": math.isfinite(self.sparsity) and self.sparsity >= 0,
            "rate": math.isfinite(self.rate) and self.rate > 0,
            "start": 0 < self.start < 1,
        }
        wrong = [name for name, fine in right.items() if not fine]
        if wrong:
            raise ArgumentError(
                "training_invalid",
                f"{wrong[0]} is {getattr(self, wrong[0])}; steps is at least 1, sparsity "
                "zero or more, rate above zero, start between 0 and 1",
                value=getattr(self, wrong[0]),
                field=wrong[0],
            )

    def to_json(self) -> Mapping[str, float]:
        return dict(vars(self))


def edge_mask(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    start: Circuit | None = None,
    *,
    training: Training | None = None,
    ablation: Ablation | str = "patch",
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Circuit:
    """Train gates and return the circuit of those that end open.

    `metric` None is `kl()`; it must be differentiable. `start` restricts the edges that
    have gates; all others are ablated. Provenance holds the losses; the gates come with
    `train_gates`. Each step uses one chunk of `batch_size` examples, in turn.

    Raises ArgumentError `training_invalid`, `edge_unknown`, `ablation_unknown`,
    `capability_missing`; DataError `prompt_lengths_differ`, `metric_not_finite`.
    """
    circuit, _ = train_gates(
        model,
        prompts,
        metric,
        start,
        training=training,
        ablation=ablation,
        batch_size=batch_size,
        progress=progress,
    )
    return circuit


def train_gates(
    model: Any,
    prompts: Prompts,
    metric: Metric | None = None,
    start: Circuit | None = None,
    *,
    training: Training | None = None,
    ablation: Ablation | str = "patch",
    batch_size: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Circuit, EdgeTable]:
    """As `edge_mask`; also return the gates as EDGE rows.

    A row's `score` is minus the gate's chance of being open (turned for metrics where
    lower is better), so that its `support` is that chance, and `top_k` ranks by it.
    """
    model = as_backend(model)
    require(model, Capability.GRADIENTS)
    metric, training = metric or kl(), training or Training()
    begun, clock = now(), time.perf_counter()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    universe = model.shape.edge_mask if start is None else start.mask(model.shape)
    chunks = [
        prepare(model, rows, metric)
        for rows in source.chunks(batch_size or len(prompts))
    ]
    gates = Gates(universe, training, model.device, model.dtype)
    with model.frozen():
        losses = _train(model, chunks, metric, gates, training, progress)
    chance = gates.chance()
    run = Run(
        kind="edge",
        model=model.info,
        dataset=prompts.name,
        dataset_digest=prompts.digest,
        n=len(prompts),
        policy={
            "method": "edge_mask",
            "method_options": dict(training.to_json()),
            "metric": metric.describe(),
            "ablation": source.record,
            "reduction": "gate",
            "grain": "site",
            "universe": "all" if start is None else start.id,
        },
        provenance={"losses": losses},
        seed=training.seed,
        started_at=begun,
        seconds=time.perf_counter() - clock,
        versions=versions(),
    )
    table = _table(model.shape, chance, universe, run, metric)
    kept = np.zeros_like(universe)
    kept[universe] = gates.settled() > 0.5
    edges = frozenset(model.shape.names_of(kept))
    provenance = {
        "schema": SCHEMA,
        "selector": "edge_mask",
        "text": f"edge_mask(sparsity={training.sparsity:g}, steps={training.steps})",
        "run_id": table.run_id,
        "universe": int(universe.sum()),
        "n": len(edges),
        "pruned": False,
        **run.provenance,
    }
    return Circuit(edges, model.shape, run, provenance), table


class Gates:
    """One hard-concrete gate for every edge of a universe `[sender, receiver]`."""

    def __init__(
        self,
        universe: np.ndarray,
        training: Training,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.universe = torch.from_numpy(universe).to(device)
        first = math.log(training.start / (1 - training.start))
        first += TEMPERATURE * math.log(-LOW / HIGH)
        count = int(universe.sum())
        self.logits = torch.full((count,), first, device=device, dtype=dtype)
        self.logits.requires_grad_()
        # On the CPU, so that a seed means the same on every device.
        self._generator = torch.Generator().manual_seed(training.seed)

    def draw(self) -> Tensor:
        """Gates `[1, sender, receiver]`, differentiable in the logits."""
        uniform = torch.rand(self.logits.shape, generator=self._generator)
        noise = uniform.clamp(1e-6, 1 - 1e-6).logit().to(self.logits)
        open_ = torch.sigmoid((noise + self.logits) / TEMPERATURE)
        values = (open_ * (HIGH - LOW) + LOW).clamp(0, 1)
        spread = torch.zeros(self.universe.shape).to(self.logits)
        return spread.masked_scatter(self.universe, values)[None]

    def open_share(self) -> Tensor:
        """The expected share of gates that are not shut."""
        return self._open().mean()

    def _open(self) -> Tensor:
        return torch.sigmoid(self.logits - TEMPERATURE * math.log(-LOW / HIGH))

    def chance(self) -> np.ndarray:
        """Each gate's chance of not being shut, float64 `[gate]`."""
        return self._open().detach().double().cpu().numpy()

    def settled(self) -> np.ndarray:
        """Each gate without noise, in [0, 1], float64 `[gate]`."""
        values = torch.sigmoid(self.logits) * (HIGH - LOW) + LOW
        return values.clamp(0, 1).detach().double().cpu().numpy()


def _train(
    model: Any,
    chunks: list[Chunk],
    metric: Metric,
    gates: Gates,
    training: Training,
    progress: Callable[[int, int], None] | None,
) -> list[float]:
    optimizer = torch.optim.Adam([gates.logits], lr=training.rate)
    sign = -1.0 if metric.higher_is_better else 1.0
    losses = []
    for step in range(training.steps):
        chunk = chunks[step % len(chunks)]
        logits = run_circuits(
            model, chunk.batch, chunk.side, gates.draw(), positions=chunk.positions
        )[0]
        loss = sign * metric(logits, chunk.batch).mean()
        loss = loss + training.sparsity * gates.open_share()
        (gates.logits.grad,) = torch.autograd.grad(loss, [gates.logits])
        optimizer.step()
        losses.append(float(loss.detach()))
        if progress:
            progress(step + 1, training.steps)
    return losses


def _table(
    shape: Any, chance: np.ndarray, universe: np.ndarray, run: Run, metric: Metric
) -> EdgeTable:
    senders, receivers = shape.edge_indices
    spread = np.full(universe.shape, np.nan)
    spread[universe] = -chance if metric.higher_is_better else chance
    scores = spread[senders, receivers]
    status = np.where(np.isnan(scores), "unavailable", "ok").tolist()
    return EdgeTable(edge_rows(shape, scores, None, run.n, status), run)
