"""Edges as a graph of components: which edges are connected, paths, ancestors.

Graphs are views: built from EDGE rows or a circuit when asked, and thrown away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from circuitlab.sites import Edge, ModelShape, fed_by, parse_edge


def connected_edges(edges: Iterable[str], shape: ModelShape | None) -> frozenset[str]:
    """The edges that lie on a path from `input` to `logits`: the rest dangles.

    This is the fixpoint of dropping every edge whose sender nothing kept reaches, or
    whose receiver feeds nothing kept. A head is reached through any of its q, k and v,
    and through those of its KV group. Linear in the number of edges.

    Raises ArgumentError `shape_needed` for grouped keys and values without a shape.
    Source: EAP-IG's `Graph.prune`; circuit-tracer's pruning to a fixpoint.
    """
    ends = {name: _ends(parse_edge(name), shape) for name in edges}
    after, before = defaultdict(list), defaultdict(list)
    for sender, fed in ends.values():
        after[sender] += fed
        for name in fed:
            before[name].append(sender)
    reached = _closure("input", after)
    useful = _closure("logits", before)
    return frozenset(
        name
        for name, (sender, fed) in ends.items()
        if sender in reached and not useful.isdisjoint(fed)
    )


def _ends(edge: Edge, shape: ModelShape | None) -> tuple[str, list[str]]:
    """An edge's sender, and the components that its receiver is an input of."""
    fed = [component.name for component in fed_by(edge.receiver, shape)]
    return edge.sender.name, fed or [edge.receiver.name]


def _closure(start: str, neighbours: dict[str, list[str]]) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        for name in neighbours.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found
