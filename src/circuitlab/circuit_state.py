"""A circuit whose values are kept, so that a few changed edges cost only what they change.

The state holds what every sender adds beyond its ablated value, and every attention
port's output, under one circuit on one chunk of prompts. A trial changes the edges into
one receiver: only components that read a changed sender through a kept edge, and that a
kept edge leaves, are computed again, from that receiver's layer on. Layers that nothing
changes are passed by. A trial can be committed; else it leaves no trace.

It gives the numbers of `circuit_run`, and holds for models whose heads do not act on
each other within a layer (`coupling` says where they do).
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
from circuitlab.sites import PORTS, ModelShape, fed_by


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
    return Chunk(batch, ablated_side(model, rows.ablated, batch), positions)


@dataclass(frozen=True)
class Plan:
    """What a trial computes: per layer the ports' receivers and the heads that change,
    which layers' MLPs do, and whether the logits do. Receivers and senders by index."""

    ports: dict[tuple[int, str], np.ndarray]
    heads: dict[int, np.ndarray]
    mlps: frozenset[int]
    logits: bool
    changed: np.ndarray

    @property
    def components(self) -> int:
        """How many head and MLP outputs one circuit computes."""
        return sum(map(len, self.heads.values())) + len(self.mlps)

    def touches(self, layer: int) -> bool:
        return layer in self.heads or layer in self.mlps


class Wiring:
    """A shape's index arithmetic: which senders each receiver feeds, layer by layer."""

    def __init__(self, shape: ModelShape):
        self.shape = shape
        layers = range(shape.n_layers)
        self.columns = {
            (layer, port): shape.columns(layer, port)
            for layer in layers
            for port in (*PORTS, "in")
        }
        self.attention = [
            np.concatenate([self.columns[layer, port] for port in PORTS])
            for layer in layers
        ]
        self.heads = [shape.rows(layer, "head") for layer in layers]
        self.mlps = [shape.rows(layer, "mlp") for layer in layers]
        self.logits = shape.receiver_index["logits"]
        index = shape.sender_index
        self.feeds = np.zeros((len(shape.receivers), len(shape.senders)), dtype=bool)
        for column, receiver in enumerate(shape.receivers):
            self.feeds[column, [index[c.name] for c in fed_by(receiver, shape)]] = True

    def alive(self, mask: np.ndarray) -> np.ndarray:
        """The receivers whose component a kept edge leaves; the logits are alive."""
        found = np.asarray((self.feeds & mask.any(1)).any(1))
        found[self.logits] = True
        return found

    def plan(self, mask: np.ndarray, column: int | None) -> Plan:
        """What changes under a mask when one receiver's input does (None: all)."""
        active, alive = np.asarray(mask.any(1)), self.alive(mask)
        hot = np.zeros(len(alive), dtype=bool)
        hot[slice(None) if column is None else column] = True
        hot &= alive
        changed = np.zeros(len(active), dtype=bool)
        ports: dict[tuple[int, str], np.ndarray] = {}
        heads: dict[int, np.ndarray] = {}
        mlps = []
        for layer in range(self.shape.n_layers):
            found = self.attention[layer][hot[self.attention[layer]]]
            if len(found):
                own = self.feeds[found].any(0) & active
                heads[layer] = np.flatnonzero(own)
                changed |= own
                hot |= mask[own].any(0) & alive
                for port in PORTS:
                    columns = self.columns[layer, port]
                    ports[layer, port] = columns[np.isin(columns, found)]
            if hot[self.columns[layer, "in"]].any():
                mlps.append(layer)
                changed[self.mlps[layer]] = True
                hot |= mask[self.mlps[layer]].any(0) & alive
        ports = {key: columns for key, columns in ports.items() if len(columns)}
        final = bool(hot[self.logits])
        return Plan(ports, heads, frozenset(mlps), final, changed)

    def places(self, layer: int, port: str, columns: np.ndarray) -> list[int]:
        """Receiver indices as places among the heads (or KV groups) of a port."""
        return np.searchsorted(self.columns[layer, port], columns).tolist()


@dataclass
class Trial:
    """One pass of K changed circuits: its logits `[circuit, example, …]`, and what
    `Focus.commit` needs. `inputs` are the receiver's, `[circuit, example, pos,
    d_model]`."""

    column: int | None
    inputs: Tensor | None
    logits: Tensor
    senders: dict[int, Tensor] = field(default_factory=dict)
    ports: dict[tuple[int, str], Tensor] = field(default_factory=dict)


class CircuitState:
    """One circuit on one chunk, with its values.

    `difference` `[sender, example, pos, d_model]` is what a sender adds beyond its
    ablated value; it means nothing for senders that no kept edge leaves.
    """

    @torch.no_grad()
    def __init__(self, model: Backend, chunk: Chunk, mask: np.ndarray, wiring: Wiring):
        self.model = model
        self.chunk = chunk
        self.wiring = wiring
        self.mask = mask.copy()
        stream = chunk.side.final
        self.difference = stream.new_zeros(len(mask), *stream.shape)
        self.ports = {k: value.clone() for k, value in chunk.side.projections.items()}
        self.plan = wiring.plan(self.mask, None)
        self.logits = _Pass(self, self.plan, 1, building=True).run().logits

    def moves_nothing(self, sender: int) -> bool:
        """Whether a sender's value is its ablated one, so that its edges carry nothing."""
        return not bool(self.difference[sender].any())

    def base(self, column: int) -> Tensor:
        """The ablated stream at a receiver, `[example, pos, d_model]`."""
        side = self.chunk.side
        receiver = self.model.shape.receivers[column]
        layer = receiver.component.layer
        if layer is None:
            return side.final
        return side.mlp[layer] if receiver.port == "in" else side.attention[layer]

    def assembled(self, column: int, without: np.ndarray | None = None) -> Tensor:
        """A receiver's input, `[example, pos, d_model]`; `without` leaves senders out."""
        kept = self.mask[:, column]
        kept = np.flatnonzero(kept if without is None else kept & ~without)
        return self.base(column) + self._total(kept)

    def _total(self, senders: np.ndarray) -> Tensor:
        values = self.difference
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

    What the trials have in common is worked out once: which components they change,
    and what the receivers further on read from those that stay as they are.
    """

    @torch.no_grad()
    def __init__(self, state: CircuitState, column: int, plan: Plan):
        self.state = state
        self.column = column
        self.plan = plan
        self.input = state.assembled(column)
        self._rest: dict[int, Tensor] = {}

    @torch.no_grad()
    def trial(self, removed: np.ndarray) -> Trial:
        """Run circuits that lack some edges into the receiver.

        `removed` bool `[circuit, sender]`: which kept edges each lacks.
        """
        senders = np.flatnonzero(removed.any(0))
        values = self.state.difference
        picked = values[torch.from_numpy(senders).to(values.device)]
        weights = torch.from_numpy(removed[:, senders].astype(np.float32)).to(picked)
        gone = (weights @ picked.flatten(1)).unflatten(1, self.input.shape)
        inputs = self.input - gone
        found = _Pass(self.state, self.plan, len(removed), self.column, inputs)
        found.rest = self._rest
        return found.run()

    def commit(self, trial: Trial, row: int, removed: np.ndarray) -> None:
        """Make one of a trial's circuits the state's; `removed` bool `[sender]`."""
        state = self.state
        for sender, value in trial.senders.items():
            state.difference[sender] = value[row]
        for (layer, port), value in trial.ports.items():
            heads = state.wiring.places(layer, port, self.plan.ports[layer, port])
            state.ports[layer, port][:, :, heads] = value[row]
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
        copies: int,
        column: int | None = None,
        inputs: Tensor | None = None,
        building: bool = False,
    ):
        self.state = state
        self.model = state.model
        self.wiring = state.wiring
        self.plan = plan
        self.copies = copies
        self.column = column
        self.inputs = inputs
        self.building = building
        self.senders: dict[int, Tensor] = {}
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
        self._push(0, (stream - self.state.chunk.side.values.stream)[None])

    def _push(self, sender: int, difference: Tensor) -> None:
        """Keep a sender's differences, `[circuit, example, pos, d_model]`."""
        if self.building:
            self.state.difference[sender] = difference[0]
        else:
            self.senders[sender] = difference

    def _input(self, column: int) -> Tensor:
        """A receiver's input for every circuit, `[circuit, example, pos, d_model]`."""
        if self.building:
            return self.state.assembled(column)[None]
        if column == self.column:
            assert self.inputs is not None
            return self.inputs
        if column not in self.rest:
            self.rest[column] = self.state.assembled(column, self.plan.changed)
        x = self.rest[column].expand(self.copies, *self.rest[column].shape)
        kept = self.state.mask[:, column]
        for sender, difference in self.senders.items():
            if kept[sender]:
                x = x + difference
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
        # Nobody reads the stream itself, so the output projection need not run.
        project = Site(sites.attention_out.path, "instead")
        return [*taps, Tap(project, self._push_heads(layer))]

    def _port(self, layer: int, port: str) -> Callable[[Tensor], Tensor]:
        def fn(_: Tensor) -> Tensor:
            columns = self.plan.ports.get((layer, port))
            out = self.state.ports[layer, port]
            if columns is None:
                return out.repeat(self.copies, 1, 1, 1).flatten(2)
            heads = self.wiring.places(layer, port, columns)
            found = self._project(layer, port, columns, heads)
            if self.building:
                out[:, :, heads] = found[0]
            else:
                self.ports[layer, port] = found
                out = out.repeat(self.copies, 1, 1, 1)
                out[:, :, heads] = found.flatten(0, 1)
            return out.flatten(2)

        return fn

    def _project(self, layer: int, port: str, columns, heads: list[int]) -> Tensor:
        """Outputs of some of a port's receivers: `[circuit, example, pos, head,
        d_head]`."""
        x = torch.stack([self._input(int(c)) for c in columns])
        normed = self.model.norm(layer, "attention")(x).flatten(1, 3)
        weight, bias = self.model.projection(layer, port)
        out = torch.bmm(normed, weight[heads].transpose(1, 2))
        out = out.unflatten(1, x.shape[1:4]).permute(1, 2, 3, 0, 4)
        return out if bias is None else out + bias[heads]

    def _push_heads(self, layer: int) -> Callable[[Tensor], Tensor]:
        senders = self.plan.heads[layer]
        own = (senders - self.wiring.heads[layer][0]).tolist()

        def fn(z: Tensor) -> Tensor:
            heads = z.unflatten(-1, (self.model.shape.n_heads, -1))[:, :, own]
            ablated = self.state.chunk.side.values.heads[layer][:, :, own]
            change = heads.unflatten(0, (self.copies, -1)) - ablated
            wrote = head_writes(self.model, layer, change.flatten(0, 1), own)
            wrote = wrote.unflatten(1, (self.copies, -1))
            for sender, difference in zip(senders.tolist(), wrote, strict=True):
                self._push(sender, difference)
            return z.new_zeros(*z.shape[:2], self.model.shape.d_model)

        return fn

    def _push_whole(self, layer: int) -> Callable[[Tensor], None]:
        sender = int(self.wiring.heads[layer][0])

        def fn(value: Tensor) -> None:
            ablated = self.state.chunk.side.values.heads[layer][:, :, 0]
            self._push(sender, value.unflatten(0, (self.copies, -1)) - ablated)

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
        column = int(self.wiring.columns[layer, "in"][0])

        def fn(_: Tensor) -> Tensor:
            x = self._input(column)
            return self.model.norm(layer, "mlp")(x.flatten(0, 1))

        return fn

    def _push_mlp(self, layer: int) -> Callable[[Tensor], None]:
        sender = int(self.wiring.mlps[layer][0])
        scale = self.model.mlp_scale(layer)

        def fn(value: Tensor) -> None:
            change = (value * scale).unflatten(0, (self.copies, -1))
            self._push(sender, change - self.state.chunk.side.values.mlps[layer])

        return fn

    def _final(self, _: Tensor) -> Tensor:
        return self._input(self.wiring.logits).flatten(0, 1)


def _no_attention(value: Tensor) -> tuple[Tensor, None]:
    """Stands in for an attention module that is not run; blocks unpack a pair."""
    return torch.zeros_like(value), None
