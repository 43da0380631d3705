"""Files for other tools: every format reads back what it wrote."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.circuits import Circuit, greedy, top_k
from circuitlab.errors import CircuitlabError
from circuitlab.interchange import (
    export_circuit,
    group_circuit,
    import_circuit,
    ungroup_circuit,
    write_mib,
)
from circuitlab.interchange.eapig import eapig_text, mib_text, read_eapig
from circuitlab.interchange.graphs import dot_text, graphml_text, read_dot, read_graphml
from circuitlab.interchange.plain import csv_text, json_text, read_csv, read_json
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable, ModelInfo, Run, edge_rows

PLAIN = ModelShape(3, 2, 2, 8, 4, 50)
WIDE = ModelShape(2, 4, 4, 8, 2, 50)
GROUPED = ModelShape(2, 4, 2, 8, 2, 50)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, split_heads=False)
ATTENTION_ONLY = ModelShape(2, 2, 2, 8, 4, 50, has_mlp=False)


def table_of(
    shape: ModelShape, scores: np.ndarray | None = None, status: list[str] | str = "ok"
) -> EdgeTable:
    info = ModelInfo("toy", "gpt2", "w", "float32", "none", shape)
    metric = {"name": "m", "higher_is_better": True}
    run = Run("edge", info, "data", "digest", 8, {"method": "eap", "metric": metric})
    if scores is None:
        scores = np.random.default_rng(0).normal(size=shape.n_edges)
    return EdgeTable(edge_rows(shape, scores, np.abs(scores), 8, status), run)


def code_of(call) -> str:
    with pytest.raises(CircuitlabError) as refused:
        call()
    return refused.value.code


FORMATS = {
    "json": (json_text, read_json),
    "csv": (csv_text, read_csv),
    "graphml": (graphml_text, read_graphml),
    "dot": (dot_text, read_dot),
    "eap-ig": (eapig_text, read_eapig),
}


@st.composite
def scored(draw) -> tuple[Circuit, EdgeTable]:
    shape = draw(st.sampled_from([PLAIN, GROUPED, JOINED, ATTENTION_ONLY]))
    special = [0.0, -0.0, 1e-300, -1e300, math.nan, math.inf, -math.inf, 0.1]
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = rng.normal(size=shape.n_edges)
    odd = rng.random(shape.n_edges) < 0.3
    scores[odd] = np.array(special)[rng.integers(0, len(special), odd.sum())]
    lost = rng.random(shape.n_edges) < 0.1
    table = table_of(shape, scores, np.where(lost, "unreachable", "ok").tolist())
    kept = rng.random(shape.n_edges) < draw(st.sampled_from([0.0, 0.1, 0.5]))
    edges = frozenset(np.array(shape.edge_names)[kept].tolist())
    name = draw(st.text(alphabet='ab "\\<>&]{};\n-', max_size=12))
    return Circuit(edges, shape, name=name), table


def same_rows(found: EdgeTable | None, wanted: EdgeTable, names: list[str]) -> None:
    assert found is not None
    places = [wanted._position[name] for name in names]
    assert found.rows["edge"].to_pylist() == names
    for column in ("sender", "receiver", "port", "sender_layer", "receiver_layer"):
        assert (
            found.rows[column].to_pylist()
            == wanted.rows[column].take(places).to_pylist()
        )
    assert (
        found.rows["status"].to_pylist()
        == wanted.rows["status"].take(places).to_pylist()
    )
    np.testing.assert_array_equal(found.scores, wanted.scores[places])


@settings(max_examples=60, deadline=None)
@given(scored(), st.sampled_from(["json", "csv", "graphml", "dot"]))
def test_every_own_format_reads_back(case, format):
    circuit, table = case
    write, read = FORMATS[format]
    whole = format in ("json", "csv")
    found = read(write(circuit, table), None if format != "csv" else circuit.shape)
    assert found.circuit == circuit
    assert found.circuit.shape == circuit.shape
    names = [n for n in circuit.shape.edge_names if whole or n in circuit.edges]
    if format != "csv":
        assert found.circuit.name == circuit.name
    if names:
        same_rows(found.edges, table, names)
    bare = read(write(circuit, None), circuit.shape)
    assert bare.circuit == circuit
    assert bare.edges is None


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 2**32 - 1), st.integers(0, 60), st.sampled_from(["eap-ig", "mib"])
)
def test_eap_ig_reads_back_with_its_scores(seed, k, format):
    scores = np.random.default_rng(seed).normal(size=PLAIN.n_edges)
    table = table_of(PLAIN, scores)
    circuit = top_k(table, k)
    text = (
        eapig_text(circuit, table) if format == "eap-ig" else mib_text(circuit, table)
    )
    found = read_eapig(text, PLAIN)
    assert found.circuit == circuit
    assert found.edges is not None
    np.testing.assert_array_equal(found.edges.scores, scores)
    np.testing.assert_array_equal(found.edges.support, table.support)
    for rank in ("magnitude", "support"):
        assert top_k(found.edges, k, rank=rank) == top_k(table, k, rank=rank)
        assert greedy(found.edges, k, rank=rank) == greedy(table, k, rank=rank)


def test_eap_ig_layout_is_theirs():
    """Keys, kinds and sign as `Graph.to_json` of hannamw/EAP-IG (795f560) writes them."""
    table = table_of(PLAIN)
    circuit = Circuit.from_edges(["input->m0", "m0->a1.h0<q>", "a1.h0->logits"], PLAIN)
    values = json.loads(mib_text(circuit, table))
    assert list(values) == ["cfg", "nodes", "edges"]
    assert values["cfg"] == {
        "n_layers": 3,
        "n_heads": 2,
        "parallel_attn_mlp": False,
        "d_model": 8,
    }
    in_graph = [name for name, node in values["nodes"].items() if node["in_graph"]]
    assert in_graph == ["input", "m0", "a1.h0", "logits"]
    assert list(values["edges"]) == list(PLAIN.edge_names)
    score = table["input->m0"].score
    assert score is not None
    assert values["edges"]["input->m0"] == {"score": -score, "in_graph": True}
    assert values["edges"]["input->m1"]["in_graph"] is False


def test_a_file_of_eap_ig_is_read():
    text = json.dumps(
        {
            "cfg": {
                "n_layers": 1,
                "n_heads": 1,
                "parallel_attn_mlp": True,
                "d_model": 4,
            },
            "nodes": {"input": {"in_graph": True}, "logits": {"in_graph": True}},
            "edges": {
                "input->m0": {"score": 0.25, "in_graph": True},
                "m0->logits": {"score": -0.5, "in_graph": True},
                "input->logits": {"score": 0.0, "in_graph": False},
            },
        }
    )
    found = read_eapig(text)
    assert found.circuit.edges == {"input->m0", "m0->logits"}
    assert found.circuit.shape == ModelShape(1, 1, 1, 4, 4, 0, parallel=True)
    assert found.edges is not None
    assert found.edges["input->m0"].score == -0.25
    assert top_k(found.edges, 1, rank="support", prune=False).edges == {"input->m0"}


def test_a_circuit_without_scores_ranks_as_itself():
    circuit = Circuit.from_edges(["input->m0", "m0->logits"], PLAIN)
    values = json.loads(eapig_text(circuit))
    ones = {name for name, facts in values["edges"].items() if facts["score"] == 1.0}
    assert ones == circuit.edges
    assert read_eapig(json.dumps(values)).edges is None


def test_grouped_circuits_are_written_per_query_head():
    edges = ["input->a0.kv1<k>", "input->a0.h2<q>", "a0.h2->m0", "m0->logits"]
    circuit = Circuit.from_edges(edges, GROUPED)
    per_head = {"input->a0.h2<k>", "input->a0.h3<k>"}
    values = json.loads(eapig_text(circuit))
    kept = {name for name, facts in values["edges"].items() if facts["in_graph"]}
    assert kept == per_head | set(edges[1:])
    assert read_eapig(json.dumps(values)).circuit == circuit
    assert read_eapig(mib_text(circuit), GROUPED).circuit == circuit
    assert read_eapig(mib_text(circuit)).circuit.edges == kept


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_grouping_inverts_ungrouping(seed):
    kept = np.random.default_rng(seed).random(GROUPED.n_edges) < 0.3
    edges = frozenset(np.array(GROUPED.edge_names)[kept].tolist())
    circuit = Circuit(edges, GROUPED)
    wide = ungroup_circuit(circuit)
    assert wide.shape == WIDE
    assert group_circuit(wide, GROUPED) == circuit
    assert ungroup_circuit(wide) == wide


def test_half_a_group_is_refused():
    half = Circuit.from_edges(["input->a0.h2<k>", "a0.h2->logits"], WIDE)
    assert code_of(lambda: group_circuit(half, GROUPED)) == "group_incomplete"


def test_what_eap_ig_cannot_hold_is_refused():
    for shape in (JOINED, ATTENTION_ONLY):
        circuit = Circuit.from_edges(["input->logits"], shape)
        assert code_of(lambda c=circuit: eapig_text(c)) == "interchange_unsupported"
    grouped = Circuit.from_edges(["input->logits"], GROUPED)
    table = table_of(GROUPED)
    assert code_of(lambda: eapig_text(grouped, table)) == "interchange_unsupported"
    assert (
        code_of(lambda: eapig_text(Circuit.from_edges(["input->m0"]))) == "shape_needed"
    )
    plain = Circuit.from_edges(["input->logits"], PLAIN)
    holes = table_of(PLAIN, np.full(PLAIN.n_edges, np.nan))
    assert code_of(lambda: eapig_text(plain, holes)) == "score_not_exportable"
    lost = table_of(PLAIN, status="unavailable")
    assert code_of(lambda: mib_text(plain, lost)) == "score_not_exportable"
    # A table of some edges, or of none, is a table.
    for some in (holes.rows[:3], holes.rows[:0]):
        short = replace(table_of(PLAIN), rows=some)
        assert code_of(lambda t=short: eapig_text(plain, t)) == "score_not_exportable"


def test_unreachable_edges_are_zeros_in_eap_ig():
    table = table_of(PLAIN, status="unreachable")
    values = json.loads(mib_text(Circuit.from_edges([], PLAIN), table))
    assert {facts["score"] for facts in values["edges"].values()} == {0.0}


def test_mib_folders_are_named_as_mib_names_them(tmp_path):
    path = write_mib(tmp_path, "arc_easy", "llama3", table_of(PLAIN))
    assert path == tmp_path / "arc-easy_llama3" / "importances.json"
    found = import_circuit(path, shape=PLAIN)
    np.testing.assert_array_equal(found.edges.scores, table_of(PLAIN).scores)  # type: ignore[union-attr]


@pytest.mark.parametrize("ending", [".json", ".csv", ".graphml", ".dot", ".gv"])
def test_files_choose_their_format_by_ending(tmp_path, ending):
    table = table_of(PLAIN)
    circuit = top_k(table, 30)
    path = export_circuit(tmp_path / "deep" / f"circuit{ending}", circuit, table)
    assert import_circuit(path, shape=PLAIN).circuit == circuit


def test_our_json_keeps_provenance_and_run(tmp_path):
    table = table_of(PLAIN)
    circuit = top_k(table, 30, pins=["m0->m1"])
    path = export_circuit(tmp_path / "c.json", circuit, table)
    found = import_circuit(path)
    assert found.circuit.provenance == circuit.provenance
    assert found.edges is not None
    assert found.edges.rows.equals(table.rows)
    assert found.edges.run_id == table.run_id
    alone = tmp_path / "alone.json"
    alone.write_text(json.dumps(circuit.to_json()))
    assert import_circuit(alone).circuit == circuit


def test_graphml_is_read_by_networkx_with_every_port():
    import networkx as nx

    circuit = Circuit.from_edges(
        ["input->a0.h0<q>", "input->a0.h0<k>", "a0.h0->logits"], PLAIN
    )
    graph = nx.parse_graphml(graphml_text(circuit, table_of(PLAIN)))
    assert graph.number_of_edges("input", "a0.h0") == 2
    assert graph.nodes["a0.h0"] == {"kind": "head", "layer": 0, "head": 0}


def test_dot_of_other_hands_is_read():
    text = (
        'digraph { input -> m0; "m0" -> "a1.h0" [port=q, score=0.5]; "a1.h0"->logits }'
    )
    found = read_dot(text)
    assert found.circuit.edges == {"input->m0", "m0->a1.h0<q>", "a1.h0->logits"}
    assert found.edges is not None
    assert found.edges["m0->a1.h0<q>"].score == 0.5


NO_HEADS = json.dumps(
    {
        "cfg": {"n_layers": 1, "n_heads": 0, "d_model": 4, "parallel_attn_mlp": False},
        "nodes": {},
        "edges": {},
    }
)


@pytest.mark.parametrize(
    ("read", "text", "code"),
    [
        (read_json, "{", "interchange_invalid"),
        (read_json, "[]", "interchange_invalid"),
        (read_json, '{"schema": "x"}', "circuit_json_invalid"),
        (read_json, '{"schema": "circuitlab_interchange_v1"}', "interchange_invalid"),
        (read_eapig, '{"cfg": {}}', "interchange_invalid"),
        (
            read_eapig,
            NO_HEADS,
            "interchange_invalid",
        ),
        (read_eapig, '{"cfg": {}, "nodes": {}, "edges": {}}', "interchange_invalid"),
        (read_csv, "a,b\n1,2\n", "interchange_invalid"),
        (read_csv, "", "interchange_invalid"),
        (read_csv, "edge,score\ninput->m0,big\n", "interchange_invalid"),
        (read_csv, "edge\nm0\n", "edge_name_invalid"),
        (read_graphml, "<xml", "interchange_invalid"),
        (read_dot, "graph { a -- b }", "interchange_invalid"),
        (read_dot, "digraph { a -> b }", "component_name_invalid"),
    ],
)
def test_broken_files_are_refused(read, text, code):
    assert code_of(lambda: read(text)) == code


def test_files_that_are_not_there_or_not_known_are_refused(tmp_path):
    assert (
        code_of(lambda: import_circuit(tmp_path / "no.json")) == "interchange_missing"
    )
    assert code_of(lambda: import_circuit(tmp_path / "no.xyz")) == "format_unknown"
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    assert (
        code_of(lambda: import_circuit(tmp_path / "bytes.csv")) == "interchange_invalid"
    )
