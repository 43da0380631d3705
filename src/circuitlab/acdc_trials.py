"""How ACDC's trials are run: from kept values (`circuit_state`), each computing only what
it changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from circuitlab.backends import Backend
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_state import CircuitState, Focus, Trial
from circuitlab.metrics import Metric
from circuitlab.wiring import Plan, wiring_of


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


def _means(logits: Sequence[Tensor], chunks: Sequence[Chunk], metric: Metric):
    """M's means over all examples, from each chunk's logits `[circuit, example, …]`."""
    parts = []
    for found, chunk in zip(logits, chunks, strict=True):
        rows = [metric(one, chunk.batch).double().cpu().numpy() for one in found]
        parts.append(np.stack(rows))
    return np.concatenate(parts, axis=1).mean(1).tolist()


class Trials:
    """Measures circuits that lack some edges into the receiver in focus."""

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
        """Take a circuit up; `value` is its M."""
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
        """Forget the receiver in focus."""
        self._focuses = []

    def focus(self, column: int) -> None:
        """Turn to a receiver, if it isn't in focus already."""
        if not self._focuses:
            self._plan = self.wiring.plan(self._states[0].mask, column)
            self._focuses = [Focus(s, column, self._plan) for s in self._states]

    def values(self, removed: np.ndarray) -> list[float]:
        """M without the edges of `removed` bool `[circuit, sender]`, for each circuit."""
        assert self._plan is not None
        self._found = [focus.trial(removed) for focus in self._focuses]
        self.components += self._plan.components * len(removed)
        self.passes += 1
        logits = [trial.logits for trial in self._found]
        return _means(logits, self.chunks, self.metric)

    def commit(self, row: int, removed: np.ndarray) -> None:
        """Make a circuit of the last call the current one."""
        for focus, trial in zip(self._focuses, self._found, strict=True):
            focus.commit(trial, row, removed)

    def idle(self, sender: int) -> bool:
        """Whether what the receiver in focus reads of a sender is its ablated value."""
        # Senders further back are not touched by what is decided about their readers.
        key = (sender, self._focuses[0].everywhere)
        if key not in self._idle:
            self._idle[key] = all(f.moves_nothing(sender) for f in self._focuses)
        return self._idle[key]

    def drop(self, sender: int) -> None:
        """Take out an edge into the receiver in focus that carries nothing."""
        for focus in self._focuses:
            focus.drop(sender)

    def drop_all(self, column: int) -> None:
        """Take out every edge into a receiver that nothing kept reads."""
        for state in self._states:
            state.mask[:, column] = False
