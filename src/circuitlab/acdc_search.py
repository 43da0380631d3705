"""ACDC's search: the loop over receivers and their edges, and what it decides.

Several edges are tried in one pass, each under a guess about those before it; thresholds
go together until they disagree; every decision goes to the step log, and comes from it
where a killed run goes on. Nothing of that changes a decision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from circuitlab.acdc_trials import Counts, Trials
from circuitlab.checkpoint import Checkpoint
from circuitlab.errors import DataError
from circuitlab.sites import ModelShape

ORDER = "receivers and their senders in reverse canonical order"


def visit_order(shape: ModelShape) -> tuple[int, ...]:
    """Receiver indices in the order ACDC visits them: the logits first.

    The reverse of the canonical order: layer, kind, head number, port. A receiver's
    senders are visited in reverse canonical order too.
    """
    return tuple(reversed(range(len(shape.receivers))))


@dataclass
class Branch:
    """One line of decisions, shared by the thresholds that agree on all of them.

    `receiver` counts the receivers that are done; of the next one, senders from `below`
    on are (None: none). `change` `[sender, receiver]` is NaN where nothing was tested.
    """

    thresholds: tuple[float, ...]
    mask: np.ndarray
    change: np.ndarray
    current: float
    receiver: int = 0
    below: int | None = None

    def fork(self, thresholds: tuple[float, ...]) -> Branch:
        return replace(
            self,
            thresholds=thresholds,
            mask=self.mask.copy(),
            change=self.change.copy(),
        )


@dataclass
class Search:
    """The loop over receivers and edges, with speculation, splits and the step log."""

    shape: ModelShape
    trials: Trials
    higher_is_better: bool
    speculate: int
    log: Checkpoint | None
    progress: Callable[[int, int], None] | None
    counts: Counts = field(default_factory=Counts)

    def run(
        self, universe: np.ndarray, thresholds: tuple[float, ...]
    ) -> Iterator[Branch]:
        """Yield a finished branch for every set of thresholds that agreed throughout."""
        self._replay = [] if self.log is None else list(self.log.steps)
        self._replay.reverse()
        self._width = 1
        self._open: list[Branch] = []
        self._live: Branch | None = None
        blank = np.full(universe.shape, np.nan)
        first = Branch(thresholds, universe.copy(), blank, float("nan"))
        first.current = self._first_value(first)
        self._open.append(first)
        while self._open:
            yield self._finish(self._open.pop())
        if self._replay:
            self._next_step([])  # no run has that: the log is of a longer one

    def _first_value(self, branch: Branch) -> float:
        if self._replay:
            return self._next_step(None)
        self._go_live(branch)
        value = self.trials.value
        self._say({"value": value})
        return value

    def _go_live(self, branch: Branch) -> None:
        """Compute the branch's circuit, unless the trials stand there already."""
        if self._live is not branch:
            self.trials.begin(branch.mask)
            self._live = branch

    def _say(self, *steps: Any) -> None:
        if self.log is not None:
            self.log.append(*steps)

    def _finish(self, branch: Branch) -> Branch:
        order = visit_order(self.shape)
        for done in range(branch.receiver, len(order)):
            branch.receiver = done
            column = order[done]
            if branch.below is None and not self._alive(branch, column):
                self._skip(branch, column)
            else:
                self._visit(branch, column)
            branch.below = None
            if self.progress:
                decided = sum(int(self.shape.upstream[c]) for c in order[: done + 1])
                self.progress(decided, self.shape.n_edges)
        return branch

    def _alive(self, branch: Branch, column: int) -> bool:
        return bool(self.trials.wiring.alive(branch.mask)[column])

    def _skip(self, branch: Branch, column: int) -> None:
        """Drop the edges into a component that nothing kept reads."""
        self.counts.skipped += int(branch.mask[:, column].sum())
        branch.mask[:, column] = False
        if self._live is branch:
            self.trials.drop_all(column)

    def _visit(self, branch: Branch, column: int) -> None:
        """Try the edges into one receiver, latest sender first."""
        upto = self.shape.upstream[column] if branch.below is None else branch.below
        queue = np.flatnonzero(branch.mask[:upto, column])[::-1].tolist()
        self.trials.leave()
        self._expected: dict[int, float] = {}
        while queue:
            logged = self._logged(branch, column, queue)
            if logged or not queue:
                continue
            self._go_live(branch)
            self.trials.focus(column)
            self._drop_idle(branch, column, queue)
            if queue:
                self._try(branch, column, queue)

    def _logged(self, branch: Branch, column: int, queue: list[int]) -> bool:
        """Take one decision from the step log, if there is one left."""
        if not self._replay:
            return False
        sender = queue.pop(0)
        self._decide(branch, column, sender, self._next_step([sender, column]))
        return True

    def _next_step(self, edge: list[int] | None) -> float:
        """The logged value of an edge, which must be the next in the log."""
        step = self._replay.pop()
        if step.get("edge") != edge:
            raise DataError(
                "checkpoint_mismatch",
                f"the checkpoint's next edge is {step.get('edge')}, where this run has "
                f"{edge}; delete it and start again",
                value=step.get("edge"),
                expected=edge,
            )
        return step["value"]

    def _drop_idle(self, branch: Branch, column: int, queue: list[int]) -> None:
        """Decide the first edges that carry nothing: M can't change."""
        steps = []
        while queue and self.trials.idle(queue[0]) and min(branch.thresholds) > 0:
            sender = queue.pop(0)
            self.counts.idle += 1
            steps.append(self._step(sender, column, branch.current))
            self._decide(branch, column, sender, branch.current)
            self.trials.drop(sender)
        if steps:
            self._say(*steps)

    def _try(self, branch: Branch, column: int, queue: list[int]) -> None:
        """One pass over the next few edges, each as if those before it were decided as
        guessed. What follows a wrong guess is not decided, but guessed better."""
        width = min(self._width, self.speculate, len(queue))
        senders = queue[:width]
        going = [self._expect(branch, sender) for sender in senders]
        removed = np.zeros((width, len(branch.mask)), dtype=bool)
        for row, sender in enumerate(senders):
            removed[row:, sender] = True
            removed[row + 1 :, sender] = going[row]
        values = self.trials.values(removed)
        self.counts.evaluations += width
        before = branch.current
        for sender, goes, value in zip(senders, going, values, strict=True):
            self._expected[sender] = value - before
            before = value if goes else before
        steps, last, right = [], -1, 0
        for row, sender in enumerate(senders):
            queue.pop(0)
            steps.append(self._step(sender, column, values[row]))
            goes = self._decide(branch, column, sender, values[row])
            last = row if goes else last
            if goes != going[row]:
                break
            right += 1
        self.counts.wasted += width - len(steps)
        if last >= 0:
            self.trials.commit(last, removed[last])
        if right == width:
            self._width = 2 * width
        self._say(*steps)

    def _expect(self, branch: Branch, sender: int) -> bool:
        """Guess whether an edge goes: as it seemed when it was last tried, else yes."""
        if sender not in self._expected:
            return True
        return self._worse(self._expected[sender]) < max(branch.thresholds)

    def _worse(self, change: float) -> float:
        return -change if self.higher_is_better else change

    def _step(self, sender: int, column: int, value: float) -> dict[str, Any]:
        return {"edge": [int(sender), int(column)], "value": float(value)}

    def _decide(self, branch: Branch, column: int, sender: int, value: float) -> bool:
        """Remove the edge or keep it, for every threshold; True if this branch removes.

        Where thresholds disagree, those that keep it go on in a branch of their own.
        """
        change = value - branch.current
        worse = self._worse(change)
        goes = tuple(t for t in branch.thresholds if worse < t)
        stays = tuple(t for t in branch.thresholds if not worse < t)
        branch.change[sender, column] = change
        self.counts.decisions += 1
        if goes and stays:
            other = branch.fork(stays)
            other.below = sender
            self._open.append(other)
            self.counts.splits += 1
            branch.thresholds = goes
        if goes:
            branch.mask[sender, column] = False
            branch.current = value
        return bool(goes)
