"""Edges as a graph of components: which edges are connected, paths, ancestors.

Graphs are views: built from EDGE rows or a circuit when asked, and thrown away.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from circuitlab.errors import ArgumentError
from circuitlab.sites import (
    Component,
    Edge,
    ModelShape,
    fed_by,
    parse_component,
    parse_edge,
    parse_receiver,
)
from circuitlab.tables import EdgeTable

if TYPE_CHECKING:
    # Imported where a graph is built: networkx takes half a second to load.
    import networkx as nx


class EdgeSet(Protocol):
    """A Circuit, or anything else with edges and perhaps a shape."""

    @property
    def edges(self) -> frozenset[str]: ...
    @property
    def shape(self) -> ModelShape | None: ...


def connected_edges(edges: Collection[str], shape: ModelShape | None) -> frozenset[str]:
    """The edges that lie on a path from `input` to `logits`: the rest dangles.

    This is the fixpoint of dropping every edge whose sender nothing kept reaches, or
    whose receiver feeds nothing kept. A head is reached through any of its q, k and v,
    and through those of its KV group. Names are canonical. Costs as much as there are
    edges.

    Raises ArgumentError `shape_needed` for grouped keys and values without a shape.
    Source: EAP-IG's `Graph.prune`; circuit-tracer's pruning to a fixpoint.
    """
    feeds: dict[str, tuple[str, ...]] = {}
    after, before = defaultdict(list), defaultdict(list)
    for name in edges:
        sender, _, receiver = name.partition("->")
        if receiver not in feeds:
            feeds[receiver] = readers(receiver, shape)
        after[sender] += feeds[receiver]
        for reader in feeds[receiver]:
            before[reader].append(sender)
    reached = _closure("input", after)
    useful = _closure("logits", before)
    kept = {receiver for receiver, fed in feeds.items() if not useful.isdisjoint(fed)}
    parts = ((name, name.partition("->")) for name in edges)
    return frozenset(name for name, (s, _, r) in parts if s in reached and r in kept)


def readers(receiver: str, shape: ModelShape | None) -> tuple[str, ...]:
    """Names of the components that a receiver is an input of; `logits` of itself."""
    fed = fed_by(parse_receiver(receiver), shape)
    return tuple(component.name for component in fed) or (receiver,)


def _closure(start: str, neighbours: dict[str, list[str]]) -> set[str]:
    found, waiting = {start}, [start]
    while waiting:
        for name in neighbours.get(waiting.pop(), ()):
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def component_graph(
    edges: EdgeTable | EdgeSet, scores: EdgeTable | None = None
) -> nx.DiGraph:
    """A table's or a circuit's edges as a networkx.DiGraph of components.

    Nodes are component names with `kind`, `layer` and `head` (None where there is
    none). Several edges may join two components, one by each port: all are in the edge
    data's `ports`, from port to a mapping of edge, score, support, stderr, n, status.
    Beside it stand `kind` ("edge"), and `score` and `support`, which are sums over the
    ports that have one (to first order, the effect of corrupting them all; None where
    none has). Graph data: `shape`, and `run` (the params digest of the run).

    What an input feeds is an edge of `kind` "serves" and without ports, so that paths
    are whole: from `a3.kv1`, which only reads, to the query heads of its group, and
    from the heads that only read to `a3` where outputs can't be split by head.

    A circuit's edges get their numbers from `scores`. Raises ArgumentError
    `shape_needed` for grouped keys and values without a shape, `by_score_invalid`
    (reason `grain`) for rows by position or example.
    """
    import networkx as nx

    if isinstance(edges, EdgeTable):
        table = edges if scores is None else scores
        shape = edges.run.model.shape
        names: Iterable[str] = edges.rows["edge"].to_pylist()
    else:
        table, shape, names = scores, edges.shape, edges.edges
    facts = {} if table is None else _facts(table)
    run = None if table is None else table.run.params_digest
    graph = nx.DiGraph(shape=shape, run=run)
    for edge in sorted((parse_edge(name) for name in names), key=lambda e: e.order):
        _add(graph, edge, facts.get(edge.name, {}), shape)
    return graph


def _facts(table: EdgeTable) -> dict[str, dict[str, Any]]:
    """Each edge's numbers by name."""
    columns = ["edge", "score", "stderr", "n", "status"]
    rows = table.rows.select(columns).to_pylist()
    turn = -1.0 if table.higher_is_better else 1.0
    found = {}
    for row in rows:
        score = row["score"]
        found[row["edge"]] = {**row, "support": None if score is None else turn * score}
    if len(found) < len(rows):
        raise ArgumentError(
            "by_score_invalid",
            "an edge has several rows; sum or average over positions and examples first",
            reason="grain",
        )
    return found


_UNSCORED = dict.fromkeys(["score", "support", "stderr", "n", "status"])


def _add(
    graph: nx.DiGraph, edge: Edge, facts: dict[str, Any], shape: ModelShape | None
) -> None:
    sender, reader = edge.sender.name, edge.receiver.component.name
    for component in (edge.sender, edge.receiver.component):
        _add_node(graph, component)
    if not graph.has_edge(sender, reader):
        graph.add_edge(sender, reader, kind="edge", ports={}, score=None, support=None)
    data = graph.edges[sender, reader]
    data["ports"][edge.receiver.port] = {**_UNSCORED, **facts, "edge": edge.name}
    for number in ("score", "support"):
        if facts.get(number) is not None:
            data[number] = (data[number] or 0.0) + facts[number]
    for fed in fed_by(edge.receiver, shape):
        if fed.name != reader and not graph.has_edge(reader, fed.name):
            _add_node(graph, fed)
            graph.add_edge(reader, fed.name, kind="serves", ports={})


def _add_node(graph: nx.DiGraph, component: Component) -> None:
    if component.name not in graph:
        kind, layer, head = component.kind, component.layer, component.head
        graph.add_node(component.name, kind=kind, layer=layer, head=head)


def edge_names(graph: nx.DiGraph) -> tuple[str, ...]:
    """The edges that a component graph holds, in canonical order."""
    ports = (data["ports"].values() for _, _, data in graph.edges(data=True))
    names = [port["edge"] for by_port in ports for port in by_port]
    return tuple(sorted(names, key=lambda name: parse_edge(name).order))


def prune_graph(graph: nx.DiGraph) -> nx.DiGraph:
    """A new graph of what lies on a path from `input` to `logits`."""
    import networkx as nx

    if "input" not in graph or "logits" not in graph:
        return graph.edge_subgraph([]).copy()
    after = {"input", *nx.descendants(graph, "input")}
    before = {"logits", *nx.ancestors(graph, "logits")}
    return graph.subgraph(after & before).copy()


def through(graph: nx.DiGraph, components: Iterable[str]) -> nx.DiGraph:
    """A new graph of what lies on a path from `input` to `logits` by a component.

    Raises ArgumentError `component_unknown` for one that the graph does not have.
    """
    import networkx as nx

    wanted = {_known(graph, name) for name in components}
    kept: set[tuple[str, str]] = set()
    if "input" in graph and "logits" in graph:
        after = {"input", *nx.descendants(graph, "input")}
        before = {"logits", *nx.ancestors(graph, "logits")}
        for name in wanted & after & before:
            kept.update(
                graph.subgraph({name, *nx.ancestors(graph, name)} & after).edges
            )
            later = {name, *nx.descendants(graph, name)} & before
            kept.update(graph.subgraph(later).edges)
    return graph.edge_subgraph(kept).copy()


def ancestors(graph: nx.DiGraph, component: str) -> tuple[str, ...]:
    """Every component from which a path leads to this one, in canonical order."""
    import networkx as nx

    return _in_order(nx.ancestors(graph, _known(graph, component)))


def descendants(graph: nx.DiGraph, component: str) -> tuple[str, ...]:
    """Every component to which a path leads from this one, in canonical order."""
    import networkx as nx

    return _in_order(nx.descendants(graph, _known(graph, component)))


def paths(
    graph: nx.DiGraph, source: str = "input", target: str = "logits"
) -> Iterator[tuple[str, ...]]:
    """Every path between two components, as their names: shorter ones not first.

    There may be very many: take what you need with itertools.islice. Paths come in
    canonical order of their components. Raises ArgumentError `component_unknown`.
    """
    _known(graph, source)
    useful = {_known(graph, target), *ancestors(graph, target)}
    return _walk(graph, (source,), target, useful)


def _walk(
    graph: nx.DiGraph, path: tuple[str, ...], target: str, useful: set[str]
) -> Iterator[tuple[str, ...]]:
    if path[-1] == target:
        yield path
        return
    for name in _in_order(set(graph.successors(path[-1])) & useful):
        yield from _walk(graph, (*path, name), target, useful)


def _known(graph: nx.DiGraph, component: str) -> str:
    name = parse_component(component).name
    if name not in graph:
        raise ArgumentError(
            "component_unknown",
            f"the graph has no component {component!r}; none of its edges touches it",
            value=component,
        )
    return name


def _in_order(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(names, key=lambda name: parse_component(name).order))
