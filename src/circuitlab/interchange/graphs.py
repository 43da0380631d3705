"""GraphML and DOT: the circuit's edges for graph tools, one edge a port.

Where keys and values are grouped, edges of class `serves` join the group's node to its
query heads, so that paths are whole; they are no edges of the circuit.
"""

from __future__ import annotations

import json
import re
from typing import Any
from xml.etree.ElementTree import ParseError

from circuitlab.circuit import Circuit
from circuitlab.graph import component_graph
from circuitlab.interchange.records import (
    Imported,
    Record,
    facts_from_texts,
    imported,
    invalid,
    record,
)
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable

_ILLEGAL = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def graphml_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """A directed multigraph: node data kind, layer, head; edge data as in EDGE."""
    import networkx as nx

    graph = component_graph(circuit, edges)
    shape = json.dumps(circuit.shape.to_json()) if circuit.shape else ""
    out = nx.MultiDiGraph(name=_ILLEGAL.sub("�", circuit.name), shape=shape)
    for name, data in graph.nodes(data=True):
        out.add_node(name, **_present(data))
    for sender, receiver, data in graph.edges(data=True):
        if data["kind"] == "serves":
            out.add_edge(sender, receiver, kind="serves")
        for port, facts in data["ports"].items():
            out.add_edge(sender, receiver, kind="edge", port=port, **_present(facts))
    return "\n".join(nx.generate_graphml(out)) + "\n"


def _present(data: Record) -> Record:
    return {key: value for key, value in data.items() if value is not None}


def read_graphml(text: str, shape: ModelShape | None = None) -> Imported:
    """Read GraphML whose edges say `edge`, or `port` where they enter attention.

    Raises DataError `interchange_invalid`.
    """
    import networkx as nx

    try:
        graph = nx.parse_graphml(text)
    except (ParseError, nx.NetworkXError) as error:
        raise invalid(f"not GraphML: {error}", text[:80]) from None
    found = [
        _read_edge(str(sender), str(receiver), data)
        for sender, receiver, data in graph.edges(data=True)
        if data.get("kind") != "serves"
    ]
    shape = shape or _shape(graph.graph.get("shape"))
    return imported(found, shape, graph.graph.get("name", ""), text)


def _shape(text: str | None) -> ModelShape | None:
    if not text:
        return None
    try:
        return ModelShape(**json.loads(text))
    except (TypeError, ValueError):
        raise invalid("the graph's shape is not a model's shape", text) from None


def _read_edge(sender: str, receiver: str, data: Record) -> Record:
    port = data.get("port", "in")
    name = data.get("edge")
    if name is None:
        name = f"{sender}->{receiver}" + ("" if port == "in" else f"<{port}>")
    facts = facts_from_texts(data, str(name))
    return {**record(name, facts), "in_circuit": True}


def dot_text(circuit: Circuit, edges: EdgeTable | None = None) -> str:
    """A digraph for Graphviz, from left to right, coloured by the sign of support."""
    graph = component_graph(circuit, edges)
    shape = json.dumps(circuit.shape.to_json()) if circuit.shape else ""
    lines = [
        f"digraph {_quote(circuit.name)} {{",
        f"  graph [rankdir=LR, comment={_quote(shape)}];",
        '  node [shape=box, style=rounded, fontname="Helvetica"];',
        *(f"  {_quote(name)};" for name in graph.nodes),
    ]
    sizes = [abs(p["score"]) for p in _ports(graph) if p["score"] is not None]
    most = max((size for size in sizes if size < float("inf")), default=0.0)
    for sender, receiver, data in graph.edges(data=True):
        ends = f"  {_quote(sender)} -> {_quote(receiver)}"
        if data["kind"] == "serves":
            lines.append(f'{ends} [class="serves", style=dotted, arrowhead=none];')
        for port, facts in data["ports"].items():
            lines.append(f"{ends} [{_attributes(port, facts, most)}];")
    return "\n".join([*lines, "}"]) + "\n"


def _ports(graph: Any) -> list[Record]:
    return [
        facts
        for _, _, data in graph.edges(data=True)
        for facts in data["ports"].values()
    ]


def _attributes(port: str, facts: Record, most: float) -> str:
    shown = {"edge": facts["edge"], "port": port}
    shown |= {"label": port} if port != "in" else {}
    support = facts["support"]
    if support is not None and most:
        shown["color"] = "#1f5fa8" if support > 0 else "#c4472b"
        share = min(1.0, abs(support) / most)
        shown["penwidth"] = f"{0.6 + 3.4 * share:.2f}"
    for key in ("score", "stderr", "n", "status"):
        if facts[key] is not None:
            shown[key] = repr(facts[key]) if key != "status" else facts[key]
    return ", ".join(f"{key}={_quote(str(value))}" for key, value in shown.items())


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


_QUOTED = r'"(?:\\.|[^"\\])*"'
_NAME = rf"(?:{_QUOTED}|[\w.]+)"
_STATEMENT = re.compile(
    rf"({_NAME})\s*->\s*({_NAME})\s*(?:\[((?:{_QUOTED}|[^\]\"])*)\])?", re.DOTALL
)
_ATTRIBUTE = re.compile(rf"(\w+)\s*=\s*({_QUOTED}|[^\s,;\]]+)")
_GRAPH = re.compile(rf"\s*(?:strict\s+)?digraph\s*({_NAME})?\s*\{{")
_COMMENT = re.compile(rf"graph\s*\[[^\]\"]*comment\s*=\s*({_QUOTED})")


def read_dot(text: str, shape: ModelShape | None = None) -> Imported:
    """Read a digraph's edge statements, `"m0" -> "a1.h0" [port="q"]`.

    Subgraphs and chains of arrows are not understood. Raises DataError
    `interchange_invalid`.
    """
    head = _GRAPH.match(text)
    if head is None:
        raise invalid("not a DOT digraph", text[:80])
    found = []
    for statement in _STATEMENT.finditer(text, head.end()):
        sender, receiver = _unquote(statement[1]), _unquote(statement[2])
        pairs = _ATTRIBUTE.findall(statement[3] or "")
        data = {key: _unquote(value) for key, value in pairs}
        if data.get("class") != "serves":
            found.append(_read_edge(sender, receiver, data))
    comment = _COMMENT.search(text)
    shape = shape or _shape(_unquote(comment[1]) if comment else None)
    return imported(found, shape, _unquote(head[1] or ""), text)


def _unquote(text: str) -> str:
    if not text.startswith('"'):
        return text
    escapes = {"n": "\n"}
    return re.sub(r"\\(.)", lambda m: escapes.get(m[1], m[1]), text[1:-1])
