"""ACDC as the paper has it: one whole pass for every tested edge. The plain reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from circuitlab.ablations import AblationSource, as_ablation
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import prepare
from circuitlab.circuits import Circuit
from circuitlab.coupling import heads_are_coupled
from circuitlab.metrics import Metric
from circuitlab.prompts import Prompts
from circuitlab.sites import PORTS, fed_by


@dataclass
class Sequential:
    """The circuit, the change of M at every tested edge, and what it cost."""

    edges: frozenset[str] = frozenset()
    changes: dict[str, float] = field(default_factory=dict)
    calls: int = 0
    components: int = 0


def sequential_acdc(
    model: Any,
    prompts: Prompts,
    metric: Metric,
    threshold: float,
    start: Circuit | None = None,
    ablation: str = "patch",
    limit: int | None = None,
) -> Sequential:
    """Receivers from the logits back, senders latest first; `limit` tests at most."""
    shape, found = model.shape, Sequential()
    source = AblationSource(model, prompts, as_ablation(ablation), metric)
    chunk = prepare(model, source.rows(slice(0, len(prompts))), metric)
    mask = (shape.edge_mask if start is None else start.mask(shape)).copy()

    def measure() -> float:
        found.calls += 1
        found.components += int(mask[1:].any(1).sum())
        logits = run_circuits(model, chunk, [mask])
        return float(metric(logits[0], chunk.batch).double().mean())

    coupled = heads_are_coupled(model)
    current = measure()
    for receiver in reversed(shape.receivers):
        column = shape.receiver_index[receiver.name]
        fed = [shape.sender_index[c.name] for c in fed_by(receiver, shape)]
        if coupled and receiver.port in PORTS:
            # A head that nothing reads still moves the others of its layer.
            fed = list(shape.rows(receiver.component.layer, "head"))
        if fed and not mask[fed].any():
            mask[:, column] = False
            continue
        for sender in reversed(np.flatnonzero(mask[:, column])):
            if limit is not None and len(found.changes) >= limit:
                break
            mask[sender, column] = False
            value = measure()
            worse = current - value if metric.higher_is_better else value - current
            name = f"{shape.senders[sender].name}->{receiver.name}"
            found.changes[name] = value - current
            if worse < threshold:
                current = value
            else:
                mask[sender, column] = True
    found.edges = frozenset(shape.names_of(mask))
    return found
