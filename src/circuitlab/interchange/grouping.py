"""The same circuit in grouped and ungrouped names of keys and values."""

from __future__ import annotations

from dataclasses import replace

from circuitlab.circuit import Circuit
from circuitlab.errors import ArgumentError
from circuitlab.sites import Component, Edge, ModelShape, Receiver, fed_by, parse_edge


def ungroup_circuit(circuit: Circuit) -> Circuit:
    """The same circuit with one k and v receiver per query head.

    Exact: corrupting a KV group's input corrupts it for every head of the group. A
    circuit without groups comes back as it is. Raises ArgumentError `shape_needed`.
    """
    edges = {name: parse_edge(name) for name in circuit.edges}
    grouped = {n for n, edge in edges.items() if edge.receiver.component.kind == "kv"}
    shape = circuit.shape
    if not grouped and (shape is None or shape.n_kv_heads == shape.n_heads):
        return circuit
    shape = circuit.known_shape("ungrouping")
    expanded = {name for edge in grouped for name in _members(edge, shape)}
    wide = replace(shape, n_kv_heads=shape.n_heads)
    kept = frozenset(circuit.edges - grouped | expanded)
    provenance = {**circuit.provenance, "ungrouped": len(grouped), "n": len(kept)}
    return Circuit(kept, wide, None, provenance, circuit.name)


def group_circuit(circuit: Circuit, shape: ModelShape) -> Circuit:
    """An ungrouped circuit in the names of a model with grouped keys and values.

    Raises ArgumentError `group_incomplete` where only some heads of a group have an
    edge: the grouped model cannot corrupt a key or value for one head alone.
    """
    per_group = shape.n_heads // shape.n_kv_heads
    edges, grouped = set(), set()
    for name in circuit.edges:
        edge = parse_edge(name)
        component = edge.receiver.component
        if component.kind == "head" and edge.receiver.port in ("k", "v"):
            assert component.head is not None
            kv = Component("kv", component.layer, component.head // per_group)
            grouped.add(Edge(edge.sender, Receiver(kv, edge.receiver.port)).name)
        else:
            edges.add(name)
    for name in sorted(grouped):
        missing = [m for m in _members(name, shape) if m not in circuit.edges]
        if missing:
            raise ArgumentError(
                "group_incomplete",
                f"{name} stands for all heads of its group, but the circuit lacks "
                f"{missing[0]}; add it, or use the model with ungroup_kv=True",
                value=name,
                missing=missing,
            )
    return Circuit(frozenset(edges | grouped), shape, None, {}, circuit.name)


def _members(name: str, shape: ModelShape) -> list[str]:
    """The per-head edges that a grouped edge stands for."""
    edge = parse_edge(name)
    heads = fed_by(edge.receiver, shape)
    return [
        Edge(edge.sender, Receiver(head, edge.receiver.port)).name for head in heads
    ]
