"""How ACDC's trials are run: from kept values, or, where heads act on each other within
a layer, by whole passes. Both give M of the circuit without some edges of a receiver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from circuitlab.backends import Backend
from circuitlab.circuit_run import run_circuits
from circuitlab.circuit_state import Chunk, CircuitState, Focus, Trial
from circuitlab.metrics import Metric
from circuitlab.wiring import Plan, Wiring, wiring_of


@dataclass
class Counts:
    """What a search did.

    `evaluations` counts circuits measured; `passes` calls of the model (each over all
    prompts); `components` the head and MLP outputs computed, summed over circuits.
    `wasted` are evaluations after a wrong guess, `idle` edges that carry nothing and
    went without a pass, `skipped` edges into dead receivers, `splits` disagreements of
    thresholds.
    """

    decisions: int = 0
    evaluations: int = 0
    passes: int = 0
    components: int = 0
    wasted: int = 0
    idle: int = 0
    skipped: int = 0
    splits: int = 0

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["component_evaluations"] = found.pop("components")
        found["metric_calls"] = found["evaluations"]
        return found


class Trials(Protocol):
    """Measures circuits that lack some edges into the receiver in focus."""

    wiring: Wiring
    components: int
    passes: int
    widest: int
    value: float

    def begin(self, mask: np.ndarray) -> None:
        """Take a circuit up; `value` is its M."""
        ...

    def leave(self) -> None:
        """Forget the receiver in focus."""
        ...

    def focus(self, column: int) -> None:
        """Turn to a receiver, if it isn't in focus already."""
        ...

    def values(self, removed: np.ndarray) -> list[float]:
        """M without the edges of `removed` bool `[circuit, sender]`, for each circuit."""
        ...

    def commit(self, row: int, removed: np.ndarray) -> None:
        """Make a circuit of the last call the current one."""
        ...

    def idle(self, sender: int) -> bool:
        """Whether the sender's value is its ablated one."""
        ...

    def drop(self, sender: int) -> None:
        """Take out an edge into the receiver in focus that carries nothing."""
        ...

    def drop_all(self, column: int) -> None:
        """Take out every edge into a receiver that nothing kept reads."""
        ...


def _means(logits: Sequence[Tensor], chunks: Sequence[Chunk], metric: Metric):
    """M's means over all examples, from each chunk's logits `[circuit, example, …]`."""
    parts = []
    for found, chunk in zip(logits, chunks, strict=True):
        rows = [metric(one, chunk.batch).double().cpu().numpy() for one in found]
        parts.append(np.stack(rows))
    return np.concatenate(parts, axis=1).mean(1).tolist()


class KeptValues:
    """Trials that compute only what they change: see `circuit_state`."""

    widest = 1 << 16

    def __init__(self, model: Backend, chunks: Sequence[Chunk], metric: Metric):
        self.model = model
        self.chunks = chunks
        self.metric = metric
        self.wiring = wiring_of(model)
        self.components = 0
        self.passes = 0
        self.value = float("nan")
        self._states: list[CircuitState] = []
        self._focuses: list[Focus] = []
        self._found: list[Trial] = []
        self._plan: Plan | None = None
        self._idle: dict[tuple[int, bool], bool] = {}

    def begin(self, mask: np.ndarray) -> None:
        self.leave()
        self._states.clear()
        for chunk in self.chunks:
            self._states.append(CircuitState(self.model, chunk, mask, self.wiring))
        self.components += self._states[0].plan.components
        self.passes += 1
        logits = [state.logits for state in self._states]
        self.value = _means(logits, self.chunks, self.metric)[0]
        self._idle = {}

    def leave(self) -> None:
        self._focuses = []

    def focus(self, column: int) -> None:
        if not self._focuses:
            self._plan = self.wiring.plan(self._states[0].mask, column)
            self._focuses = [Focus(s, column, self._plan) for s in self._states]

    def values(self, removed: np.ndarray) -> list[float]:
        assert self._plan is not None
        self._found = [focus.trial(removed) for focus in self._focuses]
        self.components += self._plan.components * len(removed)
        self.passes += 1
        logits = [trial.logits for trial in self._found]
        return _means(logits, self.chunks, self.metric)

    def commit(self, row: int, removed: np.ndarray) -> None:
        for focus, trial in zip(self._focuses, self._found, strict=True):
            focus.commit(trial, row, removed)

    def idle(self, sender: int) -> bool:
        # Senders further back are not touched by what is decided about their readers.
        key = (sender, self._focuses[0].everywhere)
        if key not in self._idle:
            self._idle[key] = all(f.moves_nothing(sender) for f in self._focuses)
        return self._idle[key]

    def drop(self, sender: int) -> None:
        for focus in self._focuses:
            focus.drop(sender)

    def drop_all(self, column: int) -> None:
        for state in self._states:
            state.mask[:, column] = False


class WholePasses:
    """Trials by a whole pass each, for models whose heads act on each other."""

    widest = 1

    def __init__(self, model: Backend, chunks: Sequence[Chunk], metric: Metric):
        self.model = model
        self.chunks = chunks
        self.metric = metric
        self.wiring = wiring_of(model)
        self.components = 0
        self.passes = 0
        self.value = float("nan")
        self._mask = np.zeros(0)
        self._column = 0

    def begin(self, mask: np.ndarray) -> None:
        self._mask = mask.copy()
        self.value = self._measure(self._mask)

    def leave(self) -> None:
        """Nothing is kept for a receiver."""

    def focus(self, column: int) -> None:
        self._column = column

    def _measure(self, mask: np.ndarray) -> float:
        logits = [
            run_circuits(self.model, c.batch, c.side, [mask], positions=c.positions)
            for c in self.chunks
        ]
        self.components += components_of(self.model, mask)
        self.passes += 1
        return _means(logits, self.chunks, self.metric)[0]

    def values(self, removed: np.ndarray) -> list[float]:
        found = []
        for gone in removed:
            mask = self._mask.copy()
            mask[gone, self._column] = False
            found.append(self._measure(mask))
        return found

    def commit(self, row: int, removed: np.ndarray) -> None:
        del row
        self._mask[removed, self._column] = False

    def idle(self, sender: int) -> bool:
        del sender
        return False

    def drop(self, sender: int) -> None:
        self._mask[sender, self._column] = False

    def drop_all(self, column: int) -> None:
        self._mask[:, column] = False


def components_of(model: Backend, mask: np.ndarray) -> int:
    """How many head and MLP outputs one whole pass of a circuit computes."""
    return int(mask[1:].any(1).sum())
