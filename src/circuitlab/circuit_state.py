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

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from circuitlab.ablations import Rows
from circuitlab.backends import Backend, Site, Tap, TokenBatch
from circuitlab.circuit_run import AblatedSide, ablated_side
from circuitlab.metrics import Metric, with_clean_logits
from circuitlab.senders import head_writes
from circuitlab.sites import PORTS
from circuitlab.windows import windows
from circuitlab.wiring import Plan, Reach, Wiring


@dataclass(frozen=True)
class Chunk:
    """Some examples, ready to run circuits on: the clean batch (with the full model's
    logits at its last tokens), the ablated side, and which positions are unembedded."""

    batch: TokenBatch
    side: AblatedSide
    positions: Tensor | None


@torch.no_grad()
def prepare(model: Backend, rows: Rows, metric: Metric) -> Chunk:
    """Run the full model once on some examples, and sum up their ablated side."""
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


@dataclass
class Trial:
    """One pass of K changed circuits: its logits `[circuit, example, …]`, and what
    `Focus.commit` needs. `inputs` are the receiver's, `[circuit, example, pos,
    d_model]`."""

    column: int | None
    inputs: Tensor | None
    logits: Tensor
    senders: dict[int, Difference] = field(default_factory=dict)
    ports: dict[tuple[int, str], Tensor] = field(default_factory=dict)


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
        self.end = self.every
        if chunk.positions is not None:
            self.end = stream.new_zeros(len(mask), *end.shape)
        self.ports = {k: value.clone() for k, value in chunk.side.projections.items()}
        self.plan = wiring.plan(self.mask, None)
        self.logits = (
            _Pass(self, self.plan, self.reach(), 1, building=True).run().logits
        )

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

    def bank(self, everywhere: bool) -> Tensor:
        """All differences at one window, `[sender, example, pos, d_model]`."""
        return self.every if everywhere else self.end

    def base(self, column: int) -> Tensor:
        """The ablated stream at a receiver, `[example, pos, d_model]`."""
        side = self.chunk.side
        receiver = self.model.shape.receivers[column]
        layer = receiver.component.layer
        if layer is None:
            return side.final
        return side.mlp[layer] if receiver.port == "in" else side.attention[layer]

    def assembled(
        self, column: int, everywhere: bool, without: np.ndarray | None = None
    ) -> Tensor:
        """A receiver's input at its window, `[example, pos, d_model]`; `without` leaves
        senders out."""
        kept = self.mask[:, column]
        kept = np.flatnonzero(kept if without is None else kept & ~without)
        base = self.windows.of(everywhere).take(self.base(column))
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
        inputs = self.input - gone
        found = _Pass(
            self.state, self.plan, self.reach, len(removed), self.column, inputs
        )
        found.rest = self._rest
        return found.run()

    def moves_nothing(self, sender: int) -> bool:
        """Whether what the receiver reads of a sender is its ablated value, so that the
        edge carries nothing."""
        return not bool(self.state.bank(self.everywhere)[sender].any())

    def commit(self, trial: Trial, row: int, removed: np.ndarray) -> None:
        """Make one of a trial's circuits the state's; `removed` bool `[sender]`."""
        state = self.state
        for sender, value in trial.senders.items():
            state.keep(sender, value, row)
        for (layer, port), value in trial.ports.items():
            heads = state.wiring.places(layer, port, self.plan.ports[layer, port])
            window = state.windows.of(self.reach.of(layer, port))
            window.put(value[row], state.ports[layer, port], heads)
        assert trial.inputs is not None
        self.input = trial.inputs[row]
        state.mask[removed, self.column] = False
        state.logits = trial.logits[row : row + 1]

    def drop(self, sender: int) -> None:
        """Take an edge that carries nothing out of the state's circuit."""
        self.state.mask[sender, self.column] = False


class _Pass:
    """One pass of K circuits from a state: the taps, and what they collect.

    `building` computes everything for the first time, one circuit, into the state.
    """

    def __init__(
        self,
        state: CircuitState,
        plan: Plan,
        reach: Reach,
        copies: int,
        column: int | None = None,
        inputs: Tensor | None = None,
        building: bool = False,
    ):
        self.state = state
        self.model = state.model
        self.wiring = state.wiring
        self.plan = plan
        self.reach = reach
        self.windows = state.windows
        self.copies = copies
        self.column = column
        self.inputs = inputs
        self.building = building
        self.senders: dict[int, Difference] = {}
        self.ports: dict[tuple[int, str], Tensor] = {}
        self.rest: dict[int, Tensor] = {}

    def run(self) -> Trial:
        if self.plan.logits:
            logits = self._logits()
        else:
            # A receiver from which no kept path leads to the logits.
            same = self.state.logits
            logits = same.expand(self.copies, *same.shape[1:])
        return Trial(self.column, self.inputs, logits, self.senders, self.ports)

    def _logits(self) -> Tensor:
        chunk = self.state.chunk
        positions = chunk.positions
        if positions is not None:
            positions = positions.repeat(self.copies)
        batch = chunk.batch.repeat(self.copies)
        logits = self.model.run(batch, self._taps(), positions=positions)
        return logits.unflatten(0, (self.copies, -1))

    def _taps(self) -> list[Tap]:
        taps = []
        if self.building:
            taps.append(Tap(self.model.stream, self._push_stream))
        for layer in range(self.model.shape.n_layers):
            if not self.plan.touches(layer):
                taps.append(self.model.bypass(layer))
                continue
            taps += self._attention_taps(layer)
            taps += self._mlp_taps(layer)
        return [*taps, Tap(self.model.final_stream, self._final)]

    def _push_stream(self, stream: Tensor) -> None:
        everywhere, ablated = self.reach.stream, self.state.chunk.side.values.stream
        self._push(0, self.windows.of(everywhere).take(stream), ablated, everywhere)

    def _push(
        self, sender: int, value: Tensor, ablated: Tensor, everywhere: bool
    ) -> None:
        """Keep the difference of a sender's value `[row, pos, d_model]` at a window."""
        change = value.unflatten(0, (self.copies, -1))
        change = change - self.windows.of(everywhere).take(ablated)
        self._push_change(sender, change, everywhere)

    def _push_change(self, sender: int, change: Tensor, everywhere: bool) -> None:
        """Keep a sender's differences at a window, `[circuit, example, pos, d_model]`."""
        end = change
        if everywhere:
            end = self.windows.tail.take(change.flatten(0, 1))
            end = end.unflatten(0, change.shape[:2])
        found = Difference(change if everywhere else None, end)
        if self.building:
            self.state.keep(sender, found)
        else:
            self.senders[sender] = found

    def _input(self, column: int, everywhere: bool) -> Tensor:
        """A receiver's input at its window for every circuit, `[circuit, example, pos,
        d_model]`."""
        if self.building:
            return self.state.assembled(column, everywhere)[None]
        if column == self.column:
            assert self.inputs is not None
            return self.inputs
        if column not in self.rest:
            changed = self.plan.changed
            self.rest[column] = self.state.assembled(column, everywhere, changed)
        x = self.rest[column].expand(self.copies, *self.rest[column].shape)
        kept = self.state.mask[:, column]
        for sender, found in self.senders.items():
            if kept[sender]:
                change = found.every if everywhere else found.end
                assert change is not None
                x = x + change
        return x

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
            # Nobody reads the stream itself, so the output projection need not run.
            project = Site(sites.attention_out.path, "instead")
            return [*taps, Tap(project, self._push_heads(layer))]
        seen: list[Tensor] = []
        scaled = Tap(sites.attention_out, self._push_scaled(layer, seen))
        return [*taps, Tap(sites.z, seen.append), scaled]

    def _port(self, layer: int, port: str) -> Callable[[Tensor], Tensor]:
        def fn(_: Tensor) -> Tensor:
            columns = self.plan.ports.get((layer, port))
            out = self.state.ports[layer, port]
            if columns is None:
                return out.repeat(self.copies, 1, 1, 1).flatten(2)
            heads = self.wiring.places(layer, port, columns)
            window = self.windows.of(self.reach.of(layer, port))
            found = self._project(layer, port, columns, heads)
            if self.building:
                window.put(found[0], out, heads)
            else:
                self.ports[layer, port] = found
                out = out.repeat(self.copies, 1, 1, 1)
                window.put(found.flatten(0, 1), out, heads)
            return out.flatten(2)

        return fn

    def _project(self, layer: int, port: str, columns, heads: list[int]) -> Tensor:
        """Outputs of some of a port's receivers at their window: `[circuit, example,
        pos, head, d_head]`."""
        everywhere = self.reach.of(layer, port)
        x = torch.stack([self._input(int(c), everywhere) for c in columns])
        normed = self.model.norm(layer, "attention")(x).flatten(1, 3)
        weight, bias = self.model.projection(layer, port)
        out = torch.bmm(normed, weight[heads].transpose(1, 2))
        out = out.unflatten(1, x.shape[1:4]).permute(1, 2, 3, 0, 4)
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
        change = now - take(self.state.chunk.side.values.heads[layer])[:, :, own]
        wrote = head_writes(self.model, layer, change.flatten(0, 1), own)
        wrote = wrote.unflatten(1, (self.copies, -1))
        for sender, difference in zip(senders.tolist(), wrote, strict=True):
            self._push_change(sender, difference, everywhere)

    def _push_whole(self, layer: int) -> Callable[[Tensor], None]:
        sender, everywhere = int(self.wiring.heads[layer][0]), self.reach.heads[layer]
        ablated = self.state.chunk.side.values.heads[layer][:, :, 0]

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
        column, everywhere = (
            int(self.wiring.columns[layer, "in"][0]),
            self.reach.mlps[layer],
        )

        def fn(_: Tensor) -> Tensor:
            x = self._input(column, everywhere).flatten(0, 1)
            if not self.model.layers[layer].mlp_apart:
                x = self._spread(column, x, everywhere)
            return self.model.norm(layer, "mlp")(x)

        return fn

    def _spread(self, column: int, x: Tensor, everywhere: bool) -> Tensor:
        """A receiver's input at all tokens, `[row, pos, d_model]`, from its window."""
        whole = self.state.base(column).repeat(self.copies, 1, 1)
        self.windows.of(everywhere).put(x, whole)
        return whole

    def _push_mlp(self, layer: int) -> Callable[[Tensor], Tensor | None]:
        sender, everywhere = int(self.wiring.mlps[layer][0]), self.reach.mlps[layer]
        scale = self.model.mlp_scale(layer)
        ablated = self.state.chunk.side.values.mlps[layer]

        def fn(value: Tensor) -> Tensor | None:
            apart = self.model.layers[layer].mlp_apart
            if not apart:
                value = self.windows.of(everywhere).take(value)
            self._push(sender, value * scale, ablated, everywhere)
            # Nobody reads the stream itself, which has all tokens.
            size = (len(value), *ablated.shape[1:])
            return value.new_zeros(size) if apart else None

        return fn

    def _final(self, _: Tensor) -> Tensor:
        column, everywhere = self.wiring.logits, self.state.chunk.positions is None
        x = self._input(column, everywhere).flatten(0, 1)
        return self._spread(column, x, everywhere)


def _no_attention(value: Tensor) -> tuple[Tensor, None]:
    """Stands in for an attention module that is not run; blocks unpack a pair."""
    return torch.zeros_like(value), None
