"""Component graphs: nothing lost, and paths as the model computes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.circuit import Circuit, prune
from circuitlab.errors import ArgumentError
from circuitlab.graph import (
    ancestors,
    component_graph,
    descendants,
    edge_names,
    paths,
    prune_graph,
    through,
)
from circuitlab.sites import ModelShape, parse_edge
from circuitlab.tables import EdgeTable, ModelInfo, Run, edge_rows

PLAIN = ModelShape(2, 2, 2, 8, 4, 50)
GROUPED = ModelShape(2, 4, 2, 8, 2, 50)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, split_heads=False)


def table_of(shape: ModelShape, *, higher_is_better: bool = True) -> EdgeTable:
    info = ModelInfo("toy", "gpt2", "w", "float32", "none", shape)
    metric = {"name": "m", "higher_is_better": higher_is_better}
    run = Run("edge", info, "data", "digest", 8, {"metric": metric})
    scores = np.random.default_rng(0).normal(size=shape.n_edges)
    return EdgeTable(edge_rows(shape, scores, np.abs(scores), 8), run)


@st.composite
def circuits(draw) -> Circuit:
    shape = draw(st.sampled_from([PLAIN, GROUPED, JOINED]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = rng.random(shape.n_edges) < draw(st.sampled_from([0.05, 0.2, 0.5]))
    return Circuit(frozenset(np.array(shape.edge_names)[kept].tolist()), shape)


@pytest.mark.parametrize("shape", [PLAIN, GROUPED, JOINED])
def test_no_port_is_lost(shape):
    table = table_of(shape)
    graph = component_graph(table)
    assert type(graph) is nx.DiGraph
    assert edge_names(graph) == shape.edge_names
    assert nx.is_directed_acyclic_graph(graph)
    for name in shape.edge_names:
        edge = parse_edge(name)
        data = graph.edges[edge.sender.name, edge.receiver.component.name]
        port = data["ports"][edge.receiver.port]
        assert port["edge"] == name
        assert port["score"] == table[name].score
        assert port["support"] == -port["score"]
        assert port["stderr"] == table[name].stderr
        scores = [facts["score"] for facts in data["ports"].values()]
        assert data["score"] == pytest.approx(sum(scores), abs=1e-12)


def test_nodes_say_what_they_are():
    graph = component_graph(table_of(GROUPED))
    assert graph.nodes["a1.h3"] == {"kind": "head", "layer": 1, "head": 3}
    assert graph.nodes["a1.kv1"] == {"kind": "kv", "layer": 1, "head": 1}
    assert graph.nodes["m0"] == {"kind": "mlp", "layer": 0, "head": None}
    assert graph.nodes["input"]["kind"] == "input"


def test_support_turns_with_the_metric():
    graph = component_graph(table_of(PLAIN, higher_is_better=False))
    data = graph.edges["input", "logits"]
    assert data["support"] == data["score"]


def test_a_circuit_without_scores_has_none():
    circuit = Circuit.from_edges(["input->m0", "m0->logits"], PLAIN)
    data = component_graph(circuit).edges["input", "m0"]
    assert data["score"] is None
    assert data["ports"]["in"]["status"] is None
    scored = component_graph(circuit, table_of(PLAIN))
    assert scored.edges["input", "m0"]["score"] == table_of(PLAIN)["input->m0"].score
    assert edge_names(scored) == ("input->m0", "m0->logits")


def test_an_empty_table_of_scores_is_not_the_edges_own():
    table = table_of(PLAIN)
    nothing = replace(table, rows=table.rows[:0])
    graph = component_graph(table, nothing)
    assert edge_names(graph) == PLAIN.edge_names
    assert graph.edges["input", "m0"]["score"] is None
    assert component_graph(nothing).graph["run"] == table.run.params_digest


@pytest.mark.parametrize(("shape", "whole"), [(PLAIN, 0), (GROUPED, 8), (JOINED, 4)])
def test_inputs_that_others_use_are_joined_to_them(shape, whole):
    graph = component_graph(table_of(shape))
    serving = [
        (u, v) for u, v, data in graph.edges(data=True) if data["kind"] == "serves"
    ]
    assert len(serving) == whole
    if shape is GROUPED:
        assert ("a1.kv1", "a1.h2") in serving
        assert ("a1.kv1", "a1.h1") not in serving


@settings(max_examples=60, deadline=None)
@given(circuits())
def test_pruning_the_graph_is_pruning_the_circuit(circuit):
    pruned = prune_graph(component_graph(circuit))
    assert frozenset(edge_names(pruned)) == prune(circuit).edges


@settings(max_examples=40, deadline=None)
@given(circuits())
def test_paths_are_those_of_networkx(circuit):
    graph = component_graph(circuit)
    if "input" not in graph or "logits" not in graph:
        return
    theirs = {tuple(path) for path in nx.all_simple_paths(graph, "input", "logits")}
    ours = list(itertools.islice(paths(graph), 5000))
    assert len(ours) == len(set(ours))
    assert len(ours) == 5000 or set(ours) == theirs


@settings(max_examples=40, deadline=None)
@given(circuits(), st.data())
def test_through_is_the_union_of_the_paths_by_a_component(circuit, data):
    graph = component_graph(prune(circuit))
    if not graph:
        return
    name = data.draw(st.sampled_from(sorted(graph.nodes)))
    found = through(graph, [name])
    wanted = {
        pair
        for path in paths(graph)
        if name in path
        for pair in itertools.pairwise(path)
    }
    assert set(found.edges) == wanted


def test_ancestors_come_in_canonical_order():
    edges = ["input->a0.h1<q>", "a0.h1->m0", "m0->a1.h0<k>", "input->logits"]
    graph = component_graph(Circuit.from_edges(edges))
    assert ancestors(graph, "a1.h0") == ("input", "a0.h1", "m0")
    assert descendants(graph, "input") == ("a0.h1", "m0", "a1.h0", "logits")
    with pytest.raises(ArgumentError) as refused:
        ancestors(graph, "m1")
    assert refused.value.code == "component_unknown"


def test_groups_need_the_shape():
    circuit = Circuit.from_edges(["input->a0.kv0<k>"])
    with pytest.raises(ArgumentError) as refused:
        component_graph(circuit)
    assert refused.value.code == "shape_needed"
