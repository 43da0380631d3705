"""Edge masks: learn which edges to keep, by gradient descent on gates.

Every edge gets a stochastic gate from the hard-concrete distribution (Louizos et al.
2018; used on edges by Bhaskar et al. 2024, "Edge Pruning"). A gate g lets through
`g · current + (1 − g) · ablated`. The loss is the metric's worsening plus λ times the
expected share of open gates; the circuit is the gates that end open.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import Ablation, AblationSource, as_ablation
from circuitlab.backends import Capability, as_backend, require
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import prepare
from circuitlab.circuits import SCHEMA, Circuit, check_circuit
from circuitlab.errors import require_count, require_number, require_type
from circuitlab.metrics import Metric, kl
from circuitlab.prompts import Prompts
from circuitlab.ranking import rank_edges
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
        code, positive = "training_invalid", "a finite number above zero"
        checked = {
            "steps": require_count(code, "steps", self.steps),
            "seed": require_count(code, "seed", self.seed, least=0),
            "sparsity": require_number(
                code,
                "sparsity",
                self.sparsity,
                lambda x: 0 <= x < math.inf,
                "a finite number, zero or more",
            ),
            "rate": require_number(
                code, "rate", self.rate, lambda x: 0 < x < math.inf, positive
            ),
            "start": require_number(
                code,
                "start",
                self.start,
                lambda x: 0 < x < 1,
                "a number above 0 and below 1",
            ),
        }
        # Plain numbers, which equal policies digest alike.
        vars(self).update(checked)

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
    have gates; all others are ablated. Provenance is that of a selection by support among
    the gates, with the losses; the gates come with `train_gates`. Each step uses one
    chunk of `batch_size` examples, in turn.

    Raises ArgumentError `training_invalid`, `edge_unknown`, `ablation_unknown`,
    `batch_size_invalid`, `metric_invalid`, `circuit_invalid`, `capability_missing`;
    DataError `prompt_lengths_differ`, `metric_not_finite`.
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
    metric = kl() if metric is None else metric
    training = Training() if training is None else training
    remedy = "write Training(steps=200, sparsity=1.0)"
    require_type("training_invalid", "training", training, Training, remedy)
    if start is not None:
        check_circuit(start, "start")
    begun, clock = now(), time.perf_counter()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    universe = model.shape.edge_mask if start is None else start.mask(model.shape)
    size = len(prompts) if batch_size is None else batch_size
    chunks = [prepare(model, rows, metric) for rows in source.chunks(size)]
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
    return _circuit(table, model.shape.names_of(kept), training), table


def _circuit(table: EdgeTable, kept: Sequence[str], training: Training) -> Circuit:
    """The circuit of the open gates, with the provenance of a selection by support."""
    ranked = rank_edges(table, rank="support").provenance
    provenance = {
        "schema": SCHEMA,
        **ranked,
        "selector": "edge_mask",
        "text": f"edge_mask(sparsity={training.sparsity:g}, steps={training.steps})",
        "universe": ranked["rankable"],
        "selected": len(kept),
        "n": len(kept),
        "pruned": False,
        **table.run.provenance,
    }
    return Circuit(frozenset(kept), table.shape, table.run, provenance)


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
        logits = run_circuits(model, chunk, gates.draw())[0]
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
