"""A circuit: a frozen set of edges, with how it came about.

It runs no model: whether a circuit does the work is for `evaluate` to say.
`circuitlab.circuits` makes circuits from scores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from circuitlab.errors import ArgumentError, CircuitlabError, DataError, require_type
from circuitlab.graph import connected_edges
from circuitlab.ranking import check_names
from circuitlab.sites import Edge, ModelShape, parse_edge
from circuitlab.tables import EdgeTable, Run, digest

if TYPE_CHECKING:
    from circuitlab.draw import Drawing

SCHEMA = "circuitlab_circuit_v1"


@dataclass(frozen=True, eq=False)
class Circuit:
    """A frozen set of edges. Two circuits are equal where their edges are.

    `edges` holds canonical names, whatever spelling they came in. `shape` is the
    universe the edges are from, where it is known; `run` the run whose scores chose
    them; `provenance` how they were chosen, as plain JSON values: selector, ranking,
    requested `k`, kept `n`, pins, excluded counts by reason.

    Raises ArgumentError `edge_name_invalid`, or `edge_unknown` for an edge that the
    shape (or, without one, any model) does not have.
    """

    edges: frozenset[str]
    shape: ModelShape | None = None
    run: Run | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    def __post_init__(self):
        shape = self.shape or (self.run.model.shape if self.run else None)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "edges", _normalised(self.edges, shape))
        object.__setattr__(self, "provenance", dict(self.provenance))

    @staticmethod
    def from_edges(
        edges: Iterable[str | Edge], shape: ModelShape | None = None, *, name: str = ""
    ) -> Circuit:
        """A circuit of the edges named. Raises as `Circuit` does."""
        return Circuit(frozenset(check_names(edges)), shape, name=name)

    @cached_property
    def ordered(self) -> tuple[str, ...]:
        """The edges in canonical order: sender first, then receiver."""
        if self.shape is not None:
            return tuple(sorted(self.edges, key=self.shape.edge_index.__getitem__))
        return tuple(sorted(self.edges, key=lambda name: parse_edge(name).order))

    @cached_property
    def id(self) -> str:
        """A digest of the edges alone: equal circuits have equal ids."""
        return digest(sorted(self.edges))[:32]

    @cached_property
    def nodes(self) -> tuple[str, ...]:
        """Every component that an edge leaves or enters, in canonical order."""
        edges = [parse_edge(name) for name in self.edges]
        found = {edge.sender for edge in edges}
        found |= {edge.receiver.component for edge in edges}
        return tuple(c.name for c in sorted(found, key=lambda part: part.order))

    @property
    def n_requested(self) -> int | None:
        """The `k` that was asked for, where a selector that counts made it."""
        return self.provenance.get("k")

    def __len__(self) -> int:
        return len(self.edges)

    def __iter__(self) -> Iterator[str]:
        return iter(self.ordered)

    def __contains__(self, edge: object) -> bool:
        if isinstance(edge, Edge):
            return edge.name in self.edges
        if not isinstance(edge, str):
            return False
        return edge in self.edges or parse_edge(edge).name in self.edges

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Circuit):
            return NotImplemented
        return self.edges == other.edges

    def __hash__(self) -> int:
        return hash(self.edges)

    def __le__(self, other: Circuit) -> bool:
        return self.edges <= other.edges

    def __lt__(self, other: Circuit) -> bool:
        return self.edges < other.edges

    def __or__(self, other: Circuit) -> Circuit:
        return self._combined(other, "|", self.edges | other.edges)

    def __and__(self, other: Circuit) -> Circuit:
        return self._combined(other, "&", self.edges & other.edges)

    def __sub__(self, other: Circuit) -> Circuit:
        return self._combined(other, "-", self.edges - other.edges)

    def __xor__(self, other: Circuit) -> Circuit:
        return self._combined(other, "^", self.edges ^ other.edges)

    def _combined(self, other: Circuit, sign: str, edges: frozenset[str]) -> Circuit:
        shape = common_shape(self.shape, other.shape)
        run = self.run if self.run == other.run else None
        provenance = {"schema": SCHEMA, "selector": sign, "of": [self.id, other.id]}
        return Circuit(edges, shape, run, {**provenance, "n": len(edges)})

    def complement(self) -> Circuit:
        """Every other edge of the model. Raises ArgumentError `shape_needed`."""
        shape = self.known_shape("the complement")
        edges = frozenset(shape.edge_names) - self.edges
        provenance = {"schema": SCHEMA, "selector": "complement", "of": [self.id]}
        return Circuit(edges, shape, self.run, {**provenance, "n": len(edges)})

    def mask(self, shape: ModelShape | None = None) -> np.ndarray:
        """The edges as a bool matrix [sender, receiver] of a shape.

        Raises ArgumentError `edge_unknown`, or `shape_needed`.
        """
        return (shape or self.known_shape("a mask")).mask_of(self.ordered)

    def known_shape(self, purpose: str) -> ModelShape:
        """The shape. Raises ArgumentError `shape_needed`, naming what needs it."""
        if self.shape is None:
            raise ArgumentError(
                "shape_needed",
                f"{purpose} depends on the model; give the circuit a shape, as in "
                "Circuit.from_edges(edges, shape=edges_table.shape)",
                value=None,
            )
        return self.shape

    def to_json(self) -> dict[str, Any]:
        """Plain values; `Circuit.from_json` reads them back."""
        return {
            "schema": SCHEMA,
            "id": self.id,
            "name": self.name,
            "edges": list(self.ordered),
            "shape": self.shape.to_json() if self.shape else None,
            "run": self.run.to_json() if self.run else None,
            "provenance": dict(self.provenance),
        }

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Circuit:
        """Read `to_json`'s values back.

        Raises DataError `circuit_json_invalid`, or `circuit_digest_mismatch` where the
        edges are not those that the id was made of.
        """
        wanted = ["schema", "id", "name", "edges", "shape", "run", "provenance"]
        keys = list(values) if isinstance(values, Mapping) else type(values).__name__
        if set(keys) != set(wanted) or values["schema"] != SCHEMA:
            raise DataError(
                "circuit_json_invalid",
                f"a circuit's JSON has schema {SCHEMA} and the keys {wanted}",
                value=keys,
                expected=wanted,
            )
        try:
            shape = ModelShape(**values["shape"]) if values["shape"] else None
            run = Run.from_json(values["run"]) if values["run"] else None
            edges, provenance = frozenset(values["edges"]), dict(values["provenance"])
            found = Circuit(edges, shape, run, provenance, str(values["name"]))
        except CircuitlabError:
            raise
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise DataError(
                "circuit_json_invalid",
                f"a part of the circuit's JSON is not what it should be: {error!r}",
                value=repr(error),
            ) from error
        if found.id != values["id"]:
            raise DataError(
                "circuit_digest_mismatch",
                "the edges are not those that the id was made of; the file was changed",
                value=found.id,
                expected=values["id"],
            )
        return found

    def to_text(self) -> str:
        """One edge a line, under a commented head; `from_text` reads it back."""
        shape = json.dumps(self.shape.to_json()) if self.shape else None
        head = [f"# {SCHEMA}"]
        head += [f"# name: {json.dumps(self.name)}"] if self.name else []
        head += [f"# shape: {shape}"] if shape else []
        return "\n".join([*head, *self.ordered]) + "\n"

    @staticmethod
    def from_text(text: str, shape: ModelShape | None = None) -> Circuit:
        """Read edges from lines or commas, with or without the head of `to_text`.

        A name needs no quotes. Raises DataError `circuit_text_invalid`; else as
        `Circuit` does.
        """
        require_type(
            "circuit_text_invalid", "the text", text, str, "read the file first"
        )
        name, edges = "", []
        for line in text.splitlines():
            key, _, value = line.removeprefix("#").strip().partition(":")
            if not line.startswith("#"):
                edges += [part.strip() for part in line.split(",") if part.strip()]
            elif key == "name":
                name = _name(value.strip())
            elif key == "shape" and shape is None:
                shape = _shape(value)
        return Circuit(frozenset(edges), shape, name=name)

    def plot(self, scores: EdgeTable | None = None, **options: Any) -> Drawing:
        """A layered drawing that notebooks show; see `draw.circuit_svg`."""
        from circuitlab.draw import Drawing, circuit_svg

        return Drawing(circuit_svg(self, scores, **options))

    def __repr__(self) -> str:
        title = f" {self.name!r}" if self.name else ""
        asked = self.n_requested
        of_k = f" (k={asked})" if asked not in (None, len(self)) else ""
        universe = f" of {self.shape.n_edges:,}" if self.shape else ""
        return f"<Circuit{title} {len(self):,} edges{universe}{of_k} {self.id[:8]}>"

    def _repr_html_(self) -> str:
        from circuitlab.draw import circuit_svg

        return circuit_svg(self)


def _name(text: str) -> str:
    """A name as `to_text` writes it, or as a person does."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    return found if isinstance(found, str) else text


def _shape(text: str) -> ModelShape:
    try:
        return ModelShape(**json.loads(text))
    except (TypeError, ValueError) as error:
        raise DataError(
            "circuit_text_invalid",
            f"the line '# shape:' says no model's shape ({error}); leave it out, and give "
            "shape= instead",
            value=text.strip(),
        ) from error


def _normalised(edges: Iterable[str], shape: ModelShape | None) -> frozenset[str]:
    if shape is None:
        return frozenset(_possible(parse_edge(name)).name for name in edges)
    known = shape.edge_index
    # Most names are canonical already: parsing 30,000 of them is the slow part.
    names = {name if name in known else parse_edge(name).name for name in edges}
    if not names <= known.keys():
        shape.mask_of(sorted(names))
    return frozenset(names)


def _possible(edge: Edge) -> Edge:
    """Refuse what no model has: a sender that writes after the receiver reads."""
    sender, reader = edge.sender, edge.receiver.component
    same_layer = sender.layer == reader.layer and sender.kind != "input"
    within = reader.kind == "mlp" and sender.kind in ("head", "attention")
    before = sender.order < reader.order and (not same_layer or within)
    if sender.kind in ("logits", "kv") or not before:
        raise ArgumentError(
            "edge_unknown",
            f"no model has an edge {edge.name!r}: a sender writes before the receiver "
            "reads, and is input, a head or an MLP",
            value=edge.name,
        )
    return edge


def common_shape(a: ModelShape | None, b: ModelShape | None) -> ModelShape | None:
    """The shape of both, or of the one that is known. Raises ArgumentError
    `circuit_shape_mismatch` where they have different edges."""
    if a is None or b is None:
        return a or b
    if a != b and a.edge_names != b.edge_names:
        raise ArgumentError(
            "circuit_shape_mismatch",
            f"the circuits are of models of different shape ({_size(a)}, and {_size(b)}); "
            "take circuits, scores and universes of one model",
            value=[a.to_json(), b.to_json()],
        )
    return a


def _size(shape: ModelShape) -> str:
    heads = f"{shape.n_layers} layers of {shape.n_heads} heads"
    return f"{heads}, {shape.n_edges:,} edges"


def check_circuit(circuit: object, name: str = "the circuit") -> None:
    """Raise ArgumentError `circuit_invalid` for anything but a Circuit."""
    remedy = "choose one with top_k(…), or name its edges: Circuit.from_edges([…])"
    require_type("circuit_invalid", name, circuit, Circuit, remedy)


def check_circuits(circuits: object) -> list[Circuit]:
    """Circuits as a list. Raises ArgumentError `circuit_invalid` for a lone one too."""
    if isinstance(circuits, Circuit) or not isinstance(circuits, Iterable):
        remedy = "give a list of circuits, as [circuit]"
        require_type("circuit_invalid", "circuits", circuits, list, remedy)
    found: list[Any] = list(circuits)  # type: ignore[arg-type]
    for circuit in found:
        check_circuit(circuit, "one of the circuits")
    return found


def prune(circuit: Circuit, *, pins: Iterable[str] = ()) -> Circuit:
    """The circuit without dangling edges: those on no path from input to logits.

    Pinned edges stay, whatever hangs on them. Provenance says how many were dropped.
    Raises ArgumentError `shape_needed` for grouped keys and values without a shape.
    """
    check_circuit(circuit)
    kept = connected_edges(circuit.edges, circuit.shape)
    kept |= _normalised(check_names(pins, "pins"), circuit.shape) & circuit.edges
    provenance = {**circuit.provenance, "n": len(kept), "pruned": True}
    provenance["dangling"] = len(circuit) - len(kept)
    return replace(circuit, edges=kept, provenance=provenance)
