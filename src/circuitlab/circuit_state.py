"""A circuit whose values are kept, so that a few changed edges cost only what they change.

The state holds what every sender adds beyond its ablated value, and every attention
port's output, under one circuit on one chunk of prompts. A trial changes the edges into
one receiver: only components that read a changed sender through a kept edge, and that a
kept edge leaves, are computed again, from that receiver's layer on and at the tokens
where they matter (`windows`). Layers that nothing changes are passed by. A trial can be
committed; else it leaves no trace.

It gives the numbers of `circuit_run`. Where heads act on each other within a layer
(`coupling`), a layer's heads are computed together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablated_side import ablated_side
from circuitlab.ablations import Rows
from circuitlab.backends import Backend
from circuitlab.circuit_pass import Chunk, CircuitPass, Values
from circuitlab.metrics import Metric, with_clean_logits
from circuitlab.windows import windows
from circuitlab.wiring import Plan, Reach, Wiring


@torch.no_grad()
def prepare(model: Backend, rows: Rows, metric: Metric) -> Chunk:
    """Run the full model once on some examples, and sum up their ablated side. The
    batch carries the full model's logits, where the metric reads them."""
    batch = rows.clean
    positions = batch.last if metric.positions == "last" else None
    full = model.run(batch, positions=positions)
    batch = with_clean_logits(batch, full, metric)
    return Chunk(batch, ablated_side(model, rows), positions)


@dataclass
class Difference:
    """What a sender adds beyond its ablated value, `[circuit, example, pos, d_model]`:
    `every` token from the first that moves (None where that does not matter), and at the
    `end`, where the logits are read."""

    every: Tensor | None
    end: Tensor


class CircuitState:
    """One circuit on one chunk, with its values.

    `every` `[sender, example, pos, d_model]` is what a sender adds beyond its ablated
    value from the first token that moves on, `end` the same where the logits are read.
    They mean nothing for senders that no kept edge leaves, and `every` nothing where
    the circuit does not reach further. Edges only go, so it never does again.
    """

    @torch.no_grad()
    def __init__(self, model: Backend, chunk: Chunk, mask: np.ndarray, wiring: Wiring):
        self.model = model
        self.chunk = chunk
        self.wiring = wiring
        self.mask = mask.copy()
        self.windows = windows(chunk.side.first, chunk.positions)
        stream, take = chunk.side.final, self.windows
        every, end = take.every.take(stream), take.end.take(stream)
        self.every = stream.new_zeros(len(mask), *every.shape)
        self.end = (
            stream.new_zeros(len(mask), *end.shape) if take.differ else self.every
        )
        self.ports = {k: value.clone() for k, value in chunk.side.projections.items()}
        self.plan = wiring.whole(self.mask)
        reach = self.reach()
        building = _Building(self, self.plan, reach)
        self.logits = self.run(self.plan, reach, building, 1, stream=True)

    def run(
        self,
        plan: Plan,
        reach: Reach,
        values: Values,
        copies: int,
        stream: bool = False,
    ) -> Tensor:
        """One pass of `copies` circuits: logits `[circuit, example, …]`."""
        parts = self.chunk, self.wiring, plan, reach, self.windows, values
        return CircuitPass(self.model, *parts, copies, stream).run()

    def reach(self) -> Reach:
        """What has to be computed at every token, as the circuit now is."""
        if self.chunk.positions is None:
            return self.wiring.everywhere()
        return self.wiring.reach(self.mask)

    def keep(self, sender: int, value: Difference, row: int = 0) -> None:
        """Make one circuit's difference of a sender the state's."""
        self.end[sender] = value.end[row]
        if value.every is not None:
            self.every[sender] = value.every[row]

    def keep_port(self, key: tuple[int, str], plan: Plan, reach: Reach, found: Tensor):
        """Make the plan's heads' outputs of a port, `[example, pos, head, d_head]`, the
        state's."""
        heads = self.wiring.places(*key, plan.ports[key])
        self.windows.of(reach.of(*key)).put(found, self.ports[key], heads)

    def bank(self, everywhere: bool) -> Tensor:
        """All differences at one window, `[sender, example, pos, d_model]`."""
        return self.every if everywhere else self.end

    def assembled(
        self, column: int, everywhere: bool, without: np.ndarray | None = None
    ) -> Tensor:
        """A receiver's input at its window, `[example, pos, d_model]`; `without` leaves
        senders out."""
        kept = self.mask[:, column]
        kept = np.flatnonzero(kept if without is None else kept & ~without)
        base = self.windows.of(everywhere).take(self.chunk.side.seen_by(column))
        return base + _total(self.bank(everywhere), kept)


def _total(values: Tensor, senders: np.ndarray) -> Tensor:
    """The sum of some rows of `[sender, …]`."""
    if len(senders) == 0:
        return torch.zeros_like(values[0])
    index = torch.from_numpy(senders).to(values.device)
    upto = int(senders[-1]) + 1
    if len(senders) * 3 < upto:
        return values[index].sum(0)
    # Most are kept: a product reads them where they lie, without a copy.
    weights = values.new_zeros(upto)
    weights[index] = 1
    return (weights @ values[:upto].flatten(1)).view_as(values[0])


@dataclass
class _Building:
    """The values of a state's first pass: all of one circuit, into the state."""

    state: CircuitState
    plan: Plan
    reach: Reach

    def inputs(self, columns: Sequence[int], everywhere: bool) -> Tensor:
        """See `Values`."""
        return torch.stack([self.state.assembled(c, everywhere) for c in columns])

    def keep(self, senders: np.ndarray, change: Tensor, everywhere: bool) -> None:
        """See `Values`."""
        end = self.state.windows.at_end(change) if everywhere else change
        self.state.end[senders] = end
        if everywhere:
            self.state.every[senders] = change

    def port(self, layer: int, port: str) -> Tensor:
        """See `Values`."""
        return self.state.ports[layer, port]

    def keep_port(self, layer: int, port: str, found: Tensor) -> None:
        """See `Values`."""
        self.state.keep_port((layer, port), self.plan, self.reach, found)


@dataclass
class Trial:
    """The values of one pass of K changed circuits: its `inputs` are those of the
    receiver in focus, `[circuit, example, pos, d_model]`, `logits` `[circuit, example,
    …]`; the rest is what `Focus.commit` needs."""

    focus: Focus
    inputs_in_focus: Tensor
    senders: dict[int, Difference] = field(default_factory=dict)
    ports: dict[tuple[int, str], Tensor] = field(default_factory=dict)
    logits: Tensor = field(init=False)

    def inputs(self, columns: Sequence[int], everywhere: bool) -> Tensor:
        """See `Values`."""
        found = [self._input(column, everywhere) for column in columns]
        return torch.stack(found).flatten(1, 2)

    def _input(self, column: int, everywhere: bool) -> Tensor:
        if column == self.focus.column:
            return self.inputs_in_focus
        rest = self.focus.rest(column, everywhere)
        x = rest.expand(len(self.inputs_in_focus), *rest.shape)
        kept = self.focus.state.mask[:, column]
        for sender, found in self.senders.items():
            if kept[sender]:
                change = found.every if everywhere else found.end
                assert change is not None
                x = x + change
        return x

    def keep(self, senders: np.ndarray, change: Tensor, everywhere: bool) -> None:
        """See `Values`."""
        at_end = self.focus.state.windows.at_end
        copies = (len(self.inputs_in_focus), -1)
        for sender, value in zip(senders.tolist(), change, strict=True):
            end = at_end(value[None])[0] if everywhere else value
            every = value.unflatten(0, copies) if everywhere else None
            self.senders[sender] = Difference(every, end.unflatten(0, copies))

    def port(self, layer: int, port: str) -> Tensor:
        """See `Values`."""
        return self.focus.state.ports[layer, port]

    def keep_port(self, layer: int, port: str, found: Tensor) -> None:
        """See `Values`."""
        copies = (len(self.inputs_in_focus), -1)
        self.ports[layer, port] = found.unflatten(0, copies)


class Focus:
    """One receiver of a state, whose incoming edges are tried one after another.

    What the trials have in common is worked out once: which components they change, at
    which tokens, and what the receivers further on read from those that stay as they
    are.
    """

    @torch.no_grad()
    def __init__(self, state: CircuitState, column: int, plan: Plan):
        self.state = state
        self.column = column
        self.plan = plan
        self.reach = state.reach()
        self.everywhere = bool(self.reach.receivers[column])
        self.input = state.assembled(column, self.everywhere)
        self._rest: dict[int, Tensor] = {}

    def rest(self, column: int, everywhere: bool) -> Tensor:
        """What a receiver reads from senders that no trial changes, `[example, pos,
        d_model]` at its window."""
        if column not in self._rest:
            changed = self.plan.changed
            self._rest[column] = self.state.assembled(column, everywhere, changed)
        return self._rest[column]

    @torch.no_grad()
    def trial(self, removed: np.ndarray) -> Trial:
        """Run circuits that lack some edges into the receiver.

        `removed` bool `[circuit, sender]`: which kept edges each lacks.
        """
        senders = np.flatnonzero(removed.any(0))
        values = self.state.bank(self.everywhere)
        picked = values[torch.from_numpy(senders).to(values.device)]
        weights = torch.from_numpy(removed[:, senders].astype(np.float32)).to(picked)
        gone = (weights @ picked.flatten(1)).unflatten(1, self.input.shape)
        found = Trial(self, self.input - gone)
        if self.plan.logits:
            found.logits = self.state.run(self.plan, self.reach, found, len(removed))
        else:
            # No kept path leads from the receiver to the logits.
            same = self.state.logits
            found.logits = same.expand(len(removed), *same.shape[1:])
        return found

    def moves_nothing(self, sender: int) -> bool:
        """Whether what the receiver reads of a sender is its ablated value, so that the
        edge carries nothing."""
        return not bool(self.state.bank(self.everywhere)[sender].any())

    def commit(self, trial: Trial, row: int, removed: np.ndarray) -> None:
        """Make one of a trial's circuits the state's; `removed` bool `[sender]`."""
        state = self.state
        for sender, value in trial.senders.items():
            state.keep(sender, value, row)
        for key, found in trial.ports.items():
            state.keep_port(key, self.plan, self.reach, found[row])
        self.input = trial.inputs_in_focus[row]
        state.mask[removed, self.column] = False
        state.logits = trial.logits[row : row + 1]

    def drop(self, sender: int) -> None:
        """Take an edge that carries nothing out of the state's circuit."""
        self.state.mask[sender, self.column] = False
