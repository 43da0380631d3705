"""Names: components, receivers, edges and sites, and how they are ordered.

This is the only module that knows how a sender or receiver is spelled and in which
order names come. It knows nothing of tensors.

The vocabulary is EAP-IG's: `input`, one head `a{layer}.h{head}`, one MLP `m{layer}`,
and `logits`, which only reads. Heads read by a port: `a1.h0<q>`. With grouped-query
attention there is one key and one value input per KV head: `a1.kv0<k>`.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache

import numpy as np

from circuitlab.errors import ArgumentError

PORTS = ("q", "k", "v")
_COMPONENT = re.compile(r"input|logits|a(\d+)(?:\.(h|kv)(\d+))?|m(\d+)")
_RECEIVER = re.compile(r"(?P<component>[^<>]+?)(?:<(?P<port>[qkv])>)?")
_KINDS = ("input", "head", "kv", "attention", "mlp", "logits")


@dataclass(frozen=True)
class Component:
    """One unit: `kind` is input, head, kv, attention, mlp or logits."""

    kind: str
    layer: int | None = None
    head: int | None = None

    @property
    def name(self) -> str:
        match self.kind:
            case "head":
                return f"a{self.layer}.h{self.head}"
            case "kv":
                return f"a{self.layer}.kv{self.head}"
            case "attention":
                return f"a{self.layer}"
            case "mlp":
                return f"m{self.layer}"
            case _:
                return self.kind

    @property
    def order(self) -> tuple[int, int, int]:
        """The canonical order: layer, kind, head number."""
        if self.kind == "input":
            return (-1, 0, 0)
        if self.kind == "logits":
            return (2**31, 0, 0)
        assert self.layer is not None
        return (self.layer, _KINDS.index(self.kind), self.head or 0)


@dataclass(frozen=True)
class Receiver:
    """A component's input: `port` is q, k or v on attention, `in` elsewhere."""

    component: Component
    port: str = "in"

    @property
    def name(self) -> str:
        port = f"<{self.port}>" if self.port in PORTS else ""
        return self.component.name + port

    @property
    def order(self) -> tuple[int, int, int, int]:
        """The canonical order: layer, kind, head number, port."""
        port = PORTS.index(self.port) if self.port in PORTS else 0
        return (*self.component.order, port)


@dataclass(frozen=True)
class Edge:
    """A sender's contribution to one receiver's input."""

    sender: Component
    receiver: Receiver

    @property
    def name(self) -> str:
        return f"{self.sender.name}->{self.receiver.name}"

    @property
    def order(self) -> tuple[int, ...]:
        """The canonical order: that of the sender, then that of the receiver."""
        return (*self.sender.order, *self.receiver.order)

    @property
    def key(self) -> str:
        """The structural edge key: equal across runs, models and spellings."""
        receiver = self.receiver
        return f"e1|{self.sender.name}|{receiver.component.name}|{receiver.port}"


def parse_component(name: str) -> Component:
    """Read a component's name. Raises ArgumentError `component_name_invalid`."""
    found = _COMPONENT.fullmatch(name)
    if found is None:
        raise ArgumentError(
            "component_name_invalid",
            f"{name!r} is no component; write input, a3.h1, a3.kv0, a3, m3 or logits",
            value=name,
        )
    layer, kind, head, mlp = found.groups()
    if mlp is not None:
        return Component("mlp", int(mlp))
    if layer is None:
        return Component(name)
    if kind is None:
        return Component("attention", int(layer))
    return Component("head" if kind == "h" else "kv", int(layer), int(head))


def parse_receiver(name: str) -> Receiver:
    """Read a receiver's name, `m3` or `a3.h1<q>`. Raises `receiver_name_invalid`."""
    found = _RECEIVER.fullmatch(name)
    component = parse_component(found["component"]) if found else None
    port = found["port"] if found else None
    attention = component is not None and component.kind in ("head", "kv", "attention")
    if component is None or component.kind == "input" or attention != bool(port):
        raise ArgumentError(
            "receiver_name_invalid",
            f"{name!r} is no receiver; write a3.h1<q>, a3.kv0<k>, m3 or logits",
            value=name,
        )
    return Receiver(component, port or "in")


@lru_cache(maxsize=1 << 18)
def parse_edge(name: str) -> Edge:
    """Read an edge's name, `m0->a1.h0<q>`. Raises ArgumentError `edge_name_invalid`."""
    text = name if isinstance(name, str) else ""
    sender, arrow, receiver = text.partition("->")
    if not arrow:
        raise ArgumentError(
            "edge_name_invalid",
            f"{name!r} is no edge; write sender->receiver, as in m0->a1.h0<q>",
            value=name,
        )
    return Edge(parse_component(sender.strip()), parse_receiver(receiver.strip()))


def site_key(path: str, slot: str = "out", pass_index: int = 1) -> str:
    """Spell the structural key of a site: `s1|blocks/3/attn/q|out|1`.

    Equal across captures, sequence lengths, processes and spellings of the same site;
    a module that runs twice in one forward differs by `pass_index`.
    """
    path = path.replace("%", "%25").replace("|", "%7C").replace(".", "/")
    return f"s1|{path}|{slot}|{pass_index}"


@lru_cache(maxsize=1 << 12)
def site_glob(pattern: str) -> re.Pattern[str]:
    """A site pattern as a regular expression: `*` stays within one dotted segment,
    `**` crosses segments, everything else is literal."""
    parts = re.split(r"(\*\*|\*)", pattern)
    spelled = {"**": ".*", "*": r"[^.]*"}
    return re.compile("".join(spelled.get(part, re.escape(part)) for part in parts))


@dataclass(frozen=True)
class ModelShape:
    """What decides a model's components and edges, and nothing else.

    `parallel`: the MLP reads the block's input, so it does not see its own layer's
    heads. `split_heads` is False where attention outputs can't be split additively by
    head: then there is one sender `a{layer}` for the whole layer.
    """

    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_model: int
    d_head: int
    d_vocab: int
    parallel: bool = False
    has_mlp: bool = True
    split_heads: bool = True

    def to_json(self) -> dict[str, int | bool]:
        return asdict(self)

    @cached_property
    def senders(self) -> tuple[Component, ...]:
        """Every sender in canonical order."""
        found = [Component("input")]
        for layer in range(self.n_layers):
            found += self._attention_senders(layer)
            if self.has_mlp:
                found.append(Component("mlp", layer))
        return tuple(found)

    @cached_property
    def receivers(self) -> tuple[Receiver, ...]:
        """Every receiver in canonical order: layer, kind, head number, port."""
        found: list[Receiver] = []
        for layer in range(self.n_layers):
            found += self._attention_receivers(layer)
            if self.has_mlp:
                found.append(Receiver(Component("mlp", layer)))
        return (*found, Receiver(Component("logits")))

    def _attention_senders(self, layer: int) -> list[Component]:
        if not self.split_heads:
            return [Component("attention", layer)]
        return [Component("head", layer, head) for head in range(self.n_heads)]

    def _attention_receivers(self, layer: int) -> list[Receiver]:
        heads = [Component("head", layer, head) for head in range(self.n_heads)]
        if self.n_kv_heads == self.n_heads:
            return [Receiver(head, port) for head in heads for port in PORTS]
        groups = [Component("kv", layer, group) for group in range(self.n_kv_heads)]
        queries = [Receiver(head, "q") for head in heads]
        return queries + [Receiver(group, port) for group in groups for port in "kv"]

    @cached_property
    def sender_index(self) -> dict[str, int]:
        return {sender.name: i for i, sender in enumerate(self.senders)}

    @cached_property
    def receiver_index(self) -> dict[str, int]:
        return {receiver.name: i for i, receiver in enumerate(self.receivers)}

    def columns(self, layer: int, port: str) -> np.ndarray:
        """Receiver indices of one layer's port (q, k, v, or `in` for the MLP)."""
        return np.array(
            [
                i
                for i, receiver in enumerate(self.receivers)
                if receiver.component.layer == layer and receiver.port == port
            ],
            dtype=np.int64,
        )

    def rows(self, layer: int, kind: str) -> np.ndarray:
        """Sender indices of one layer's `head` (or `attention`) or `mlp` senders."""
        kinds = ("head", "attention") if kind == "head" else (kind,)
        return np.array(
            [
                i
                for i, sender in enumerate(self.senders)
                if sender.layer == layer and sender.kind in kinds
            ],
            dtype=np.int64,
        )

    @cached_property
    def upstream(self) -> np.ndarray:
        """How many senders each receiver sees: they are always a prefix of `senders`."""
        counts = []
        for receiver in self.receivers:
            layer = receiver.component.layer
            if receiver.component.kind == "logits":
                counts.append(len(self.senders))
                continue
            assert layer is not None
            before = 1 + layer * (self._heads_per_layer + self.has_mlp)
            sees_own_heads = receiver.component.kind == "mlp" and not self.parallel
            counts.append(before + (self._heads_per_layer if sees_own_heads else 0))
        return np.array(counts, dtype=np.int64)

    @property
    def _heads_per_layer(self) -> int:
        return self.n_heads if self.split_heads else 1

    @cached_property
    def edge_mask(self) -> np.ndarray:
        """Which sender-receiver pairs are edges, bool [sender, receiver]."""
        order = np.arange(len(self.senders))
        return order[:, None] < self.upstream[None, :]

    @cached_property
    def edge_indices(self) -> tuple[np.ndarray, np.ndarray]:
        """Sender and receiver index of every edge, in canonical order."""
        senders, receivers = np.nonzero(self.edge_mask)
        return senders, receivers

    @property
    def n_edges(self) -> int:
        return int(self.upstream.sum())

    @cached_property
    def edge_names(self) -> tuple[str, ...]:
        """Every edge's name in canonical order (sender first, then receiver)."""
        senders = [sender.name for sender in self.senders]
        receivers = [receiver.name for receiver in self.receivers]
        pairs = zip(*(index.tolist() for index in self.edge_indices), strict=True)
        return tuple(f"{senders[u]}->{receivers[v]}" for u, v in pairs)

    @cached_property
    def edge_index(self) -> dict[str, int]:
        """Position of every edge in the canonical order."""
        return {name: i for i, name in enumerate(self.edge_names)}

    def mask_of(self, edges: object) -> np.ndarray:
        """A bool matrix [sender, receiver] with the named edges set.

        Raises ArgumentError `edge_unknown` for an edge that this model doesn't have.
        """
        index = self.edge_index
        try:
            flat = [index[name] for name in edges]  # type: ignore[attr-defined]
        except KeyError as missing:
            name = str(missing.args[0])
            raise ArgumentError(
                "edge_unknown",
                f"this model has no edge {name!r}{_why_no_edge(self, name)}; give edges, or "
                "a circuit, of this model",
                value=name,
                n_edges=self.n_edges,
            ) from None
        mask = np.zeros(self.edge_mask.shape, dtype=bool)
        senders, receivers = self.edge_indices
        mask[senders[flat], receivers[flat]] = True
        return mask

    def names_of(self, mask: np.ndarray) -> tuple[str, ...]:
        """The edges that a bool matrix [sender, receiver] holds, in canonical order."""
        senders, receivers = self.edge_indices
        kept = np.flatnonzero(mask[senders, receivers])
        return tuple(self.edge_names[i] for i in kept)


def fed_by(receiver: Receiver, shape: ModelShape | None) -> tuple[Component, ...]:
    """The senders that are computed from a receiver's input; none for `logits`.

    A head's q, k and v feed that head; a KV group's k and v feed the query heads
    `[g*H/KV, (g+1)*H/KV)` of the group. Raises ArgumentError `shape_needed` for a KV
    group without a shape, which alone knows which heads the group serves.
    """
    component = receiver.component
    if component.kind == "logits":
        return ()
    if shape is not None and not shape.split_heads and component.kind in ("head", "kv"):
        return (Component("attention", component.layer),)
    if component.kind != "kv":
        return (component,)
    if shape is None:
        raise ArgumentError(
            "shape_needed",
            f"{receiver.name} is read by a group of query heads; pass the model's shape",
            value=receiver.name,
        )
    assert component.head is not None
    per_group = shape.n_heads // shape.n_kv_heads
    first = component.head * per_group
    heads = range(first, first + per_group)
    return tuple(Component("head", component.layer, head) for head in heads)


def _why_no_edge(shape: ModelShape, name: str) -> str:
    edge = parse_edge(name)
    if edge.sender.name not in shape.sender_index:
        return f": it has no sender {edge.sender.name}"
    if edge.receiver.name not in shape.receiver_index:
        grouped = edge.receiver.port in "kv" and shape.n_kv_heads != shape.n_heads
        hint = " (keys and values are grouped: write a0.kv0<k>)" if grouped else ""
        return f": it has no receiver {edge.receiver.name}{hint}"
    return ": the sender writes after the receiver reads"
