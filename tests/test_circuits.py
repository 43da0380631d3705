"""Circuits: pruning, set algebra, overlap, and their text and JSON forms."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.circuits import (
    Circuit,
    auroc,
    overlap,
    prune,
    top_k,
)
from circuitlab.graph import connected_edges
from circuitlab.sites import ModelShape, fed_by, parse_edge
from tests.circuit_tables import (
    GROUPED,
    TOY,
    code_of,
    edge_sets,
    random_table,
    ranks,
    tables,
)

# --- pruning ---------------------------------------------------------------------


def dangling_removed_step_by_step(circuit: Circuit) -> frozenset[str]:
    """The definition, literally: drop loose edges until none is left."""
    edges = {parse_edge(name) for name in circuit.edges}
    while True:
        fed = {c.name for e in edges for c in fed_by(e.receiver, circuit.shape)}
        senders = {edge.sender.name for edge in edges}
        kept = {
            edge
            for edge in edges
            if (edge.sender.name == "input" or edge.sender.name in fed)
            and (
                edge.receiver.name == "logits"
                or any(c.name in senders for c in fed_by(edge.receiver, circuit.shape))
            )
        }
        if kept == edges:
            return frozenset(edge.name for edge in edges)
        edges = kept


@settings(max_examples=80, deadline=None)
@given(edge_sets())
def test_pruning_is_the_fixpoint_of_dropping_loose_edges(circuit):
    found = prune(circuit)
    assert found.edges == dangling_removed_step_by_step(circuit)
    assert found <= circuit
    assert prune(found) == found
    assert found.provenance["dangling"] == len(circuit) - len(found)


@settings(max_examples=40, deadline=None)
@given(edge_sets(), st.integers(0, 2**32 - 1))
def test_pruning_is_monotone(circuit, seed):
    rng = np.random.default_rng(seed)
    fewer = frozenset(e for e in sorted(circuit.edges) if rng.random() < 0.7)
    assert connected_edges(fewer, circuit.shape) <= connected_edges(
        circuit.edges, circuit.shape
    )


def test_a_head_lives_by_any_of_its_inputs():
    for port in "qkv":
        edges = [f"input->a0.h0<{port}>", "a0.h0->logits"]
        assert len(prune(Circuit.from_edges(edges))) == 2


def test_a_group_serves_its_own_heads_only():
    kept = ["input->a0.kv1<v>", "a0.h2->m0", "a0.h3->m0", "m0->logits"]
    loose = ["input->a0.kv0<k>", "m0->a1.kv0<k>"]
    circuit = Circuit.from_edges([*kept, *loose], GROUPED)
    assert prune(circuit).edges == frozenset(kept)
    unknown = Circuit.from_edges(["input->a0.kv1<v>", "a0.h2->logits"])
    assert code_of(lambda: prune(unknown)) == "shape_needed"


# --- circuits as sets ------------------------------------------------------------


def test_names_are_normalised():
    circuit = Circuit.from_edges([" m0 -> a01.h0<q>", parse_edge("input->m0")])
    assert circuit.edges == {"m0->a1.h0<q>", "input->m0"}
    assert "m0 -> a1.h0<q>" in circuit
    assert parse_edge("input->m0") in circuit
    assert "m0->m1" not in circuit
    assert 3 not in circuit


@pytest.mark.parametrize(
    "edge",
    ["m1->m0", "logits->m0", "a1.h0->a1.h1<q>", "a0.kv0->m1", "m1->a1.h0<v>", "m0->m0"],
)
def test_edges_of_no_model_are_refused(edge):
    assert code_of(lambda: Circuit.from_edges([edge])) == "edge_unknown"


def test_edges_of_another_model_are_refused():
    assert code_of(lambda: Circuit.from_edges(["m0->m7"], TOY)) == "edge_unknown"
    assert code_of(lambda: Circuit.from_edges(["m0->a1.kv0<k>"], TOY)) == "edge_unknown"
    assert code_of(lambda: Circuit.from_edges("m0->m1")) == "edges_invalid"
    assert code_of(lambda: Circuit.from_edges(["m0"])) == "edge_name_invalid"


@settings(max_examples=40, deadline=None)
@given(edge_sets())
def test_iteration_is_in_canonical_order_with_or_without_the_shape(circuit):
    known = list(circuit)
    assert known == [name for name in circuit.shape.edge_names if name in circuit.edges]
    assert list(Circuit.from_edges(circuit.edges)) == known


@settings(max_examples=40, deadline=None)
@given(edge_sets(), st.integers(0, 2**32 - 1))
def test_set_algebra_is_that_of_sets(a, seed):
    rng = np.random.default_rng(seed)
    kept = rng.random(a.shape.n_edges) < 0.3
    b = Circuit(frozenset(np.array(a.shape.edge_names)[kept].tolist()), a.shape)
    assert (a | b).edges == a.edges | b.edges
    assert (a & b).edges == a.edges & b.edges
    assert (a - b).edges == a.edges - b.edges
    assert (a ^ b).edges == a.edges ^ b.edges
    assert a | a.complement() == Circuit(frozenset(a.shape.edge_names))
    assert not a & a.complement()
    assert a.complement().complement() == a
    assert (a.mask() == a.shape.mask_of(a.edges)).all()
    assert a.shape.names_of(a.mask()) == a.ordered


def test_circuits_of_different_models_do_not_mix():
    a, b = (
        Circuit.from_edges(["input->m0"], TOY),
        Circuit.from_edges(["m0->m1"], GROUPED),
    )
    assert code_of(lambda: a | b) == "circuit_shape_mismatch"
    assert (
        code_of(lambda: Circuit.from_edges(["input->m0"]).complement())
        == "shape_needed"
    )
    assert code_of(lambda: Circuit.from_edges(["input->m0"]).mask()) == "shape_needed"


@settings(max_examples=30, deadline=None)
@given(edge_sets())
def test_equality_hash_and_id_are_of_the_edges(circuit):
    bare = Circuit.from_edges(sorted(circuit.edges, reverse=True), name="other")
    assert bare == circuit
    assert hash(bare) == hash(circuit)
    assert bare.id == circuit.id
    assert circuit != circuit.edges
    if circuit.edges:
        fewer = Circuit(frozenset(sorted(circuit.edges)[1:]), circuit.shape)
        assert fewer.id != circuit.id


@settings(max_examples=30, deadline=None)
@given(edge_sets(), st.text(max_size=20))
def test_text_and_json_read_back(circuit, name):
    circuit = Circuit(circuit.edges, circuit.shape, None, {"k": 3}, name)
    from_json = Circuit.from_json(json.loads(json.dumps(circuit.to_json())))
    from_text = Circuit.from_text(circuit.to_text())
    for found in (from_json, from_text, pickle.loads(pickle.dumps(circuit))):
        assert found == circuit
        assert found.shape == circuit.shape
        assert found.name == name
    assert from_json.to_json() == circuit.to_json()


def test_a_selected_circuit_reads_back_with_its_run():
    found = top_k(random_table(TOY), 60)
    again = Circuit.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert again.provenance == found.provenance
    assert again.run is not None
    assert again.run.params_digest == found.run.params_digest  # type: ignore[union-attr]


def test_a_bare_list_of_edges_is_text_too():
    found = Circuit.from_text("# my circuit\ninput->m0, m0->logits\n\n", TOY)
    assert found.edges == {"input->m0", "m0->logits"}


def test_a_name_that_a_person_wrote_needs_no_quotes():
    assert Circuit.from_text("# name: my circuit\ninput->m0").name == "my circuit"
    assert Circuit.from_text("# name: 5\ninput->m0").name == "5"
    for shape in ("{}", "three layers", "[1]"):
        text = f"# shape: {shape}\ninput->m0"
        assert code_of(lambda t=text: Circuit.from_text(t)) == "circuit_text_invalid"


def test_json_that_was_changed_is_refused():
    values = Circuit.from_edges(["input->m0"]).to_json()
    changed = {**values, "edges": ["input->m1"]}
    assert code_of(lambda: Circuit.from_json(changed)) == "circuit_digest_mismatch"
    assert code_of(lambda: Circuit.from_json({"edges": []})) == "circuit_json_invalid"
    for key in ("shape", "run", "edges", "provenance"):
        broken = {**values, key: 3}
        assert code_of(lambda b=broken: Circuit.from_json(b)) == "circuit_json_invalid"
        broken = {**values, key: "x"}
        assert code_of(lambda b=broken: Circuit.from_json(b)) in (
            "circuit_json_invalid",
            "edge_name_invalid",
        )
    for nothing in (None, [], "{}"):
        found = code_of(lambda n=nothing: Circuit.from_json(n))  # type: ignore[arg-type]
        assert found == "circuit_json_invalid"
    newer = {**values, "schema": "circuitlab_circuit_v9"}
    assert code_of(lambda: Circuit.from_json(newer)) == "circuit_json_invalid"


def test_the_repr_says_what_was_asked_and_what_was_kept():
    found = top_k(random_table(TOY), 60)
    assert f"{len(found)} edges of 479 (k=60)" in repr(found)
    assert found._repr_html_().startswith("<svg")
    assert "<svg" in str(found.plot(title="t"))


# --- truth ----------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(tables(), st.integers(0, 2**32 - 1), ranks)
def test_auroc_is_the_chance_of_ranking_a_true_edge_higher(table, seed, rank):
    shape = table.shape
    kept = np.random.default_rng(seed).random(shape.n_edges) < 0.2
    truth = Circuit(frozenset(np.array(shape.edge_names)[kept].tolist()), shape)
    keys = np.abs(table.scores) if rank == "magnitude" else table.support
    ok = np.array([s == "ok" for s in table.rows["status"].to_pylist()]) & ~np.isnan(
        keys
    )
    inside, outside = keys[ok & kept], keys[ok & ~kept]
    if not len(inside) or not len(outside):
        assert code_of(lambda: auroc(table, truth, rank=rank)) == "truth_invalid"
        return
    wins = (inside[:, None] > outside) + 0.5 * (inside[:, None] == outside)
    assert auroc(table, truth, rank=rank) == pytest.approx(wins.mean(), abs=1e-12)


# --- overlap ---------------------------------------------------------------------


def test_overlap_counts_and_weighs():
    found = Circuit.from_edges(["input->m0", "m0->logits", "m1->logits"], TOY)
    published = Circuit.from_edges(["input->m0", "m0->m1"], TOY)
    weights = {"input->m0": 3.0, "m0->m1": -1.0, "m0->logits": 2.0}
    seen = overlap(found, published, weights=weights)
    assert seen.iou == 1 / 4
    assert seen.weighted_iou == 3 / 6
    assert seen.precision == 1 / 3
    assert seen.recall == 1 / 2
    assert seen.false_positive_rate == 2 / (479 - 2)
    assert (seen.n_found, seen.n_published, seen.n_both) == (3, 2, 1)
    assert (seen.n_universe, seen.outside) == (479, 0)


def test_overlap_in_a_smaller_universe_leaves_the_rest_out():
    found = Circuit.from_edges(["input->m0", "m0->logits"], TOY)
    published = Circuit.from_edges(["input->m0", "m0->m1"], TOY)
    universe = Circuit.from_edges(["input->m0", "m0->logits", "m2->logits"], TOY)
    seen = overlap(found, published, universe=universe)
    assert (seen.recall, seen.precision, seen.outside) == (1.0, 0.5, 1)
    assert seen.n_universe == 3
    assert seen.weighted_iou is None


def test_an_empty_universe_is_not_the_whole_model():
    found = Circuit.from_edges(["input->m0", "m0->logits"], TOY)
    seen = overlap(found, found, universe=Circuit.from_edges([], TOY))
    assert (seen.n_universe, seen.n_both, seen.outside) == (0, 0, 2)


@settings(max_examples=30, deadline=None)
@given(edge_sets())
def test_overlap_with_itself_is_whole_and_symmetric(circuit):
    seen = overlap(circuit, circuit, weights=random_table(circuit.shape))
    assert seen.iou == 1.0
    assert seen.recall == seen.precision == (1.0 if circuit.edges else None)
    other = circuit.complement()
    assert overlap(circuit, other).iou == overlap(other, circuit).iou


def test_overlap_refuses_models_of_different_shape():
    found = Circuit.from_edges(["input->m0"], TOY)
    other = Circuit.from_edges(["input->m0"], ModelShape(1, 2, 2, 8, 4, 11))
    for arguments in ((found, other), (other, found)):
        assert code_of(lambda a=arguments: overlap(*a)) == "circuit_shape_mismatch"
    for universe in (other, other.shape):
        refused = code_of(lambda u=universe: overlap(found, found, universe=u))
        assert refused == "circuit_shape_mismatch"
