"""A shape's index arithmetic: what feeds what, layer by layer, under a mask of edges.

Masks are bool `[sender, receiver]`; senders and receivers are indices in canonical order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from circuitlab.backends import Backend
from circuitlab.coupling import heads_are_coupled
from circuitlab.sites import PORTS, ModelShape, fed_by


@dataclass(frozen=True)
class Plan:
    """What a pass computes: per layer the ports' receivers and the heads that change,
    which layers' MLPs do, and whether the logits do. Receivers and senders by index;
    `changed` bool `[sender]`."""

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


@dataclass(frozen=True)
class Reach:
    """Which components have to be computed at every token: those from which a kept path
    leads to a key or a value. The others matter only where the logits are read."""

    stream: bool
    heads: tuple[bool, ...]
    mlps: tuple[bool, ...]
    senders: np.ndarray
    receivers: np.ndarray

    def of(self, layer: int, port: str) -> bool:
        """Whether a layer's port is read at every token."""
        return port in "kv" or (self.mlps if port == "in" else self.heads)[layer]


class Wiring:
    """A shape's index arithmetic: which senders each receiver feeds, layer by layer.

    `coupled`: heads act on each other within a layer, so that what one of them reads
    feeds them all.
    """

    def __init__(self, shape: ModelShape, coupled: bool = False):
        self.shape = shape
        self.coupled = coupled
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
        if coupled:
            for columns, rows in zip(self.attention, self.heads, strict=True):
                self.feeds[np.ix_(columns, rows)] = True

    def alive(self, mask: np.ndarray) -> np.ndarray:
        """The receivers whose component a kept edge leaves; the logits are alive."""
        found = np.asarray((self.feeds & mask.any(1)).any(1))
        found[self.logits] = True
        return found

    def whole(self, mask: np.ndarray) -> Plan:
        """All of a circuit: what a kept edge leaves. A port that no kept edge enters
        stays as if every edge were cut."""
        active, read = np.asarray(mask.any(1)), mask.any(0) & self.alive(mask)
        layers = range(self.shape.n_layers)
        heads = {
            layer: self.heads[layer][active[self.heads[layer]]] for layer in layers
        }
        heads = {layer: own for layer, own in heads.items() if len(own)}
        keys = [(layer, port) for layer in heads for port in PORTS]
        ports = {key: self.columns[key][read[self.columns[key]]] for key in keys}
        ports = {key: columns for key, columns in ports.items() if len(columns)}
        mlps = [layer for layer in layers if active[self.mlps[layer]].any()]
        return Plan(ports, heads, frozenset(mlps), True, active)

    def plan(self, mask: np.ndarray, column: int) -> Plan:
        """What changes under a mask when one receiver's input does."""
        active, alive = np.asarray(mask.any(1)), self.alive(mask)
        hot = np.zeros(len(alive), dtype=bool)
        hot[column] = alive[column]
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

    def everywhere(self) -> Reach:
        """Everything at every token, as where all tokens' logits are read."""
        each = (True,) * self.shape.n_layers
        sides = self.shape.senders, self.shape.receivers
        return Reach(True, each, each, *(np.ones(len(s), dtype=bool) for s in sides))

    def reach(self, mask: np.ndarray) -> Reach:
        """What a circuit has to compute at every token."""
        read = self.alive(mask)
        wide = np.zeros(mask.shape[1], dtype=bool)
        for (_, port), columns in self.columns.items():
            if port in "kv":
                wide[columns] = read[columns]
        heads, mlps = [], []
        senders = np.zeros(len(mask), dtype=bool)
        for layer in reversed(range(self.shape.n_layers)):
            mlps.append(bool(mask[np.ix_(self.mlps[layer], wide)].any()))
            wide[self.columns[layer, "in"]] = mlps[-1]
            heads.append(bool(mask[np.ix_(self.heads[layer], wide)].any()))
            wide[self.columns[layer, "q"]] = heads[-1]
            senders[self.mlps[layer]] = mlps[-1]
            senders[self.heads[layer]] = heads[-1]
        senders[0] = mask[0, wide].any()
        each = tuple(heads[::-1]), tuple(mlps[::-1])
        return Reach(bool(senders[0]), *each, senders, wide)


def wiring_of(model: Backend) -> Wiring:
    """A model's wiring, worked out once."""
    return model.remembered(
        "wiring", lambda: Wiring(model.shape, heads_are_coupled(model))
    )
