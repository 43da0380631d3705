"""Circuits: selection, pruning, set algebra, overlap, and their text and JSON forms."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from circuitlab.circuits import (
    Circuit,
    auroc,
    cumulative_mass,
    greedy,
    overlap,
    prune,
    threshold,
    top_fraction,
    top_k,
    top_nodes,
)
from circuitlab.errors import ArgumentError, CircuitlabError
from circuitlab.graph import connected_edges
from circuitlab.ranking import Request, TopK
from circuitlab.sites import ModelShape, fed_by, parse_edge
from circuitlab.tables import EDGE, EdgeTable, ModelInfo, Run, edge_rows

GOLDEN = Path(__file__).parent / "golden" / "gpt2_toy"
TOY = ModelShape(4, 4, 4, 64, 16, 200)
GROUPED = ModelShape(2, 4, 2, 8, 2, 50)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, split_heads=False)
PARALLEL = ModelShape(3, 2, 2, 8, 4, 50, parallel=True)
SHAPES = [TOY, GROUPED, JOINED, PARALLEL]


def table_of(
    shape: ModelShape,
    scores: np.ndarray,
    *,
    status: list[str] | str = "ok",
    higher_is_better: bool = True,
) -> EdgeTable:
    info = ModelInfo("toy", "gpt2", "w", "float32", "none", shape)
    metric = {"name": "logit_diff", "higher_is_better": higher_is_better}
    policy = {"method": "eap", "reduction": "mean", "metric": metric}
    run = Run("edge", info, "data", "digest", 8, policy)
    return EdgeTable(edge_rows(shape, scores, None, 8, status), run)


def random_table(shape: ModelShape, seed: int = 0) -> EdgeTable:
    rng = np.random.default_rng(seed)
    return table_of(shape, rng.normal(size=shape.n_edges))


def code_of(call) -> str:
    with pytest.raises(CircuitlabError) as refused:
        call()
    assert refused.value.fields["code"] == refused.value.code
    return refused.value.code


# Few distinct values, so that ties are the rule.
score_values = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, np.inf, -np.inf])


@st.composite
def tables(draw) -> EdgeTable:
    shape = draw(st.sampled_from(SHAPES))
    pool = draw(st.lists(score_values, min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = np.array(pool)[rng.integers(0, len(pool), shape.n_edges)]
    scores[rng.random(shape.n_edges) < 0.1] = np.nan
    lost = rng.random(shape.n_edges) < 0.1
    status = np.where(lost, "unreachable", "ok").tolist()
    return table_of(shape, scores, status=status, higher_is_better=draw(st.booleans()))


@st.composite
def edge_sets(draw) -> Circuit:
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = rng.random(shape.n_edges) < draw(st.sampled_from([0.0, 0.05, 0.2, 0.6, 1.0]))
    return Circuit(frozenset(np.array(shape.edge_names)[kept].tolist()), shape)


ranks = st.sampled_from(["magnitude", "support"])


# --- against the peer ------------------------------------------------------------


@pytest.mark.parametrize("method", ["EAP", "EAP-IG-inputs"])
@pytest.mark.parametrize("search", ["topn", "greedy"])
@pytest.mark.parametrize("size", [20, 40, 60, 200])
def test_circuits_equal_those_of_eap_ig(method, search, size):
    golden = np.load(GOLDEN / "gpt2_toy.npz")
    index = json.loads((GOLDEN / "index.json").read_text())
    rows = {name: i for i, name in enumerate(index["forward_nodes"])}
    columns = {name: i for i, name in enumerate(index["backward_nodes"])}
    places = [
        (rows[edge.sender.name], columns[edge.receiver.name])
        for edge in map(parse_edge, TOY.edge_names)
    ]
    theirs = golden[f"eapig_scores_{method}"].astype(np.float64)
    table = table_of(TOY, np.array([-theirs[place] for place in places]))
    mask = golden[f"eapig_{method}_{search}{size}_in_graph"]
    wanted = {name for name, place in zip(TOY.edge_names, places) if mask[place]}
    select = top_k if search == "topn" else greedy
    found = select(table, size)
    assert found.edges == wanted
    assert found.n_requested == size
    assert found.provenance["n"] == len(wanted)


# --- selection -------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(tables(), ranks, st.data())
def test_top_k_is_nested_and_takes_the_best(table, rank, data):
    everything = top_k(table, 0, rank=rank, prune=False)
    rankable = everything.provenance["rankable"]
    big = data.draw(st.integers(0, rankable))
    small = data.draw(st.integers(0, big))
    large = top_k(table, big, rank=rank, prune=False)
    assert len(large) == big
    assert top_k(table, small, rank=rank, prune=False) <= large
    keys = np.abs(table.scores) if rank == "magnitude" else table.support
    names = table.rows["edge"].to_pylist()
    kept = np.array([name in large.edges for name in names])
    ok = np.array([s == "ok" for s in table.rows["status"].to_pylist()])
    ok &= ~np.isnan(table.scores)
    assert not kept[~ok].any()
    if kept.any() and (ok & ~kept).any():
        assert keys[kept].min() >= keys[ok & ~kept].max()


@settings(max_examples=60, deadline=None)
@given(tables(), ranks, st.sampled_from([-1.0, 0.0, 0.5, 0.7, 1.0, math.inf]))
def test_threshold_equals_top_k_at_the_same_cut(table, rank, bound):
    cut = threshold(table, bound, rank=rank, prune=False)
    same = top_k(table, len(cut), rank=rank, prune=False)
    assert cut == same
    assert prune(cut) == threshold(table, bound, rank=rank)
    rest = threshold(table, below=bound, rank=rank, prune=False)
    assert not cut.edges & rest.edges


@settings(max_examples=40, deadline=None)
@given(tables(), ranks, st.floats(0, 1))
def test_top_fraction_rounds_up(table, rank, fraction):
    found = top_fraction(table, fraction, rank=rank, prune=False)
    rankable = found.provenance["rankable"]
    exact = fraction * rankable
    assert (len(found) == 0) == (fraction == 0 or rankable == 0)
    assert exact - 1e-6 <= len(found) <= max(1, exact + 1)
    assert found == top_k(table, len(found), rank=rank, prune=False)


def test_a_fraction_is_not_pushed_up_by_rounding():
    shape = ModelShape(1, 1, 1, 4, 4, 10)
    scores = np.linspace(1, 2, shape.n_edges)
    table = table_of(shape, scores)
    assert len(top_fraction(table, 2 / shape.n_edges, prune=False)) == 2


@settings(max_examples=40, deadline=None)
@given(tables(), st.integers(0, 60), ranks)
def test_greedy_edges_lead_to_the_logits_when_taken(table, k, rank):
    shape = table.shape
    k = min(k, top_k(table, 0).provenance["rankable"])
    found = greedy(table, k, rank=rank, prune=False)
    assert len(found) <= k
    reached = {"logits"}
    waiting = [parse_edge(name) for name in found.edges]
    while waiting:
        ready = [
            edge
            for edge in waiting
            if edge.receiver.name in reached
            or any(fed.name in reached for fed in fed_by(edge.receiver, shape))
        ]
        assert ready, f"{waiting} do not lead to the logits"
        reached |= {edge.sender.name for edge in ready}
        waiting = [edge for edge in waiting if edge not in ready]
    assert prune(found) == greedy(table, k, rank=rank)


def test_greedy_prefers_a_weak_connected_edge_to_a_strong_loose_one():
    scores = np.zeros(TOY.n_edges)
    scores[TOY.edge_index["input->m0"]] = 5
    scores[TOY.edge_index["m1->m2"]] = 9
    scores[TOY.edge_index["m0->logits"]] = 1
    table = table_of(TOY, scores)
    assert greedy(table, 2).edges == {"input->m0", "m0->logits"}
    assert top_k(table, 2).edges == frozenset()


def test_greedy_says_when_nothing_more_is_within_reach():
    table = random_table(TOY)
    found = greedy(table, 5, where="m0->logits, input->m0, m1->m2, m2->m3, input->m1")
    assert found.edges == {"m0->logits", "input->m0"}
    assert found.provenance["exhausted"] is True


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), ranks)
def test_cumulative_mass_is_the_smallest_set_that_holds_it(seed, fraction, rank):
    table = random_table(GROUPED, seed)
    keys = np.abs(table.scores) if rank == "magnitude" else np.maximum(table.support, 0)
    found = cumulative_mass(table, fraction, rank=rank, prune=False)
    held = sum(keys[GROUPED.edge_index[name]] for name in found.edges)
    assert held >= fraction * keys.sum() * (1 - 1e-9)
    fewer = top_k(table, max(len(found) - 1, 0), rank=rank, prune=False)
    less = sum(keys[GROUPED.edge_index[name]] for name in fewer.edges)
    assert not len(found) or less < fraction * keys.sum() * (1 + 1e-9)


def test_cumulative_mass_of_zeros_is_empty_and_of_infinities_refused():
    zeros = table_of(TOY, np.zeros(TOY.n_edges))
    assert not cumulative_mass(zeros, 1.0)
    infinite = table_of(TOY, np.full(TOY.n_edges, np.inf))
    assert code_of(lambda: cumulative_mass(infinite, 0.5)) == "mass_not_finite"


def test_top_nodes_sums_the_outgoing_edges():
    scores = np.zeros(TOY.n_edges)
    for name, score in {
        "input->m0": 1.0,
        "m0->logits": 1.0,
        "m0->m1": 1.0,
        "m1->logits": 1.5,
        "a0.h0->logits": 4.0,
        "a0.h0->m0": -4.0,
    }.items():
        scores[TOY.edge_index[name]] = score
    table = table_of(TOY, scores)
    found = top_nodes(table, 2, prune=False)
    nodes = {"input", "m0", "m1"}
    assert found.edges == {
        name
        for name in TOY.edge_names
        if parse_edge(name).sender.name in nodes
        and parse_edge(name).receiver.component.name in (nodes - {"input"}) | {"logits"}
    }
    assert set(found.nodes) == nodes | {"logits"}


def test_top_nodes_reads_a_group_for_any_of_its_heads():
    scores = np.zeros(GROUPED.n_edges)
    scores[GROUPED.edge_index["a1.h3->logits"]] = 2.0
    found = top_nodes(table_of(GROUPED, scores), 1)
    assert found.edges == {
        "input->a1.h3<q>",
        "input->a1.kv1<k>",
        "input->a1.kv1<v>",
        "a1.h3->logits",
        "input->logits",
    }


def test_signed_ranking_turns_with_the_metric():
    scores = np.zeros(TOY.n_edges)
    scores[TOY.edge_index["input->logits"]] = -2.0
    scores[TOY.edge_index["m0->logits"]] = 3.0
    for better, wanted in ((True, "input->logits"), (False, "m0->logits")):
        table = table_of(TOY, scores, higher_is_better=better)
        assert top_k(table, 1, rank="support", prune=False).edges == {wanted}
        assert top_k(table, 1, prune=False).edges == {"m0->logits"}


def test_ties_break_in_canonical_order_whatever_the_order_of_rows():
    fresh = table_of(GROUPED, np.ones(GROUPED.n_edges))
    shuffled = np.random.default_rng(0).permutation(GROUPED.n_edges)
    loaded = EdgeTable(fresh.rows.take(pa.array(shuffled)), fresh.run)
    for k in (1, 7, 30):
        found = top_k(loaded, k, prune=False)
        assert found.ordered == GROUPED.edge_names[:k]
        assert greedy(loaded, k) == greedy(fresh, k)


def test_a_loaded_table_ranks_like_a_fresh_one():
    fresh = random_table(TOY)
    loaded = EdgeTable(fresh.rows, Run.from_json(fresh.run.to_json()))
    assert top_k(loaded, 60) == top_k(fresh, 60)


@pytest.mark.parametrize("k", [-1, 480, True, 2.5, None, "5"])
def test_a_k_out_of_range_is_refused(k):
    table = random_table(TOY)
    for select in (top_k, greedy, top_nodes):
        with pytest.raises(ArgumentError) as refused:
            select(table, k)
        assert refused.value.code == "k_out_of_range"
    assert code_of(lambda: top_k(table, k)) == "k_out_of_range"


def test_numpy_integers_and_zero_are_fine():
    table = random_table(TOY)
    assert top_k(table, np.int64(60)) == top_k(table, 60)
    assert len(top_k(table, 0)) == 0
    assert len(top_k(table, TOY.n_edges)) == TOY.n_edges


def test_unrankable_rows_are_counted_by_reason():
    scores = np.arange(TOY.n_edges, dtype=float)
    scores[:5] = np.nan
    status = ["ok"] * TOY.n_edges
    status[10:13] = ["unreachable"] * 3
    status[20] = "not_differentiable"
    table = table_of(TOY, scores, status=status)
    found = top_k(table, 4, where="*->m*, *->logits", prune=False)
    excluded = found.provenance["excluded"]
    considered = found.provenance["rankable"] + sum(excluded.values())
    assert considered == TOY.n_edges
    assert set(excluded) <= {"nan", "unreachable", "not_differentiable", "where"}
    everything = top_k(table, TOY.n_edges - 9, prune=False).provenance["excluded"]
    assert everything == {"nan": 5, "unreachable": 3, "not_differentiable": 1}
    assert code_of(lambda: top_k(table, TOY.n_edges - 8)) == "k_out_of_range"


def test_infinities_rank():
    scores = np.linspace(0, 1, TOY.n_edges)
    scores[7], scores[9] = -np.inf, np.inf
    found = top_k(table_of(TOY, scores), 2, prune=False)
    assert found.edges == {TOY.edge_names[7], TOY.edge_names[9]}


def test_pins_are_kept_and_not_counted():
    table = random_table(TOY)
    pins = ["a2.h1->m3", " m1->a2.h1<q>"]
    found = top_k(table, 10, pins=pins, prune=False)
    assert found.provenance["pins"] == ["m1->a2.h1<q>", "a2.h1->m3"]
    assert len(found) == 12
    assert {"a2.h1->m3", "m1->a2.h1<q>"} <= found.edges
    assert {"a2.h1->m3", "m1->a2.h1<q>"} <= top_k(table, 0, pins=pins).edges
    best = top_k(table, 1, prune=False).ordered
    assert len(top_k(table, 1, pins=best, prune=False)) == 2
    assert code_of(lambda: top_k(table, 1, pins=["m3->m1"])) == "edge_unknown"
    assert code_of(lambda: top_k(table, 1, pins=["m3"])) == "edge_name_invalid"


def test_a_pin_in_the_selector_text_is_a_pin():
    table = random_table(TOY)
    found = top_k(table, 3, where="m* & pin=a2.h1->m3", prune=False)
    assert found.provenance["pins"] == ["a2.h1->m3"]
    assert len(found) == 4


def test_rows_by_position_or_example_are_refused():
    table = random_table(TOY)
    for column, values in (("position", [0]), ("sample_id", ["a"])):
        place = EDGE.get_field_index(column)
        field = EDGE.field(column)
        filled = pa.array(values * TOY.n_edges, field.type)
        rows = EdgeTable(table.rows.set_column(place, field, filled), table.run)
        with pytest.raises(ArgumentError) as refused:
            top_k(rows, 5)
        assert refused.value.code == "by_score_invalid"
        assert refused.value.fields["reason"] == "grain"


def test_empty_and_doubled_tables_are_refused():
    table = random_table(TOY)
    reasons = []
    for rows in (table.rows.slice(0, 0), pa.concat_tables([table.rows, table.rows])):
        with pytest.raises(ArgumentError) as refused:
            top_k(EdgeTable(rows, table.run), 1)
        assert refused.value.code == "by_score_invalid"
        reasons.append(refused.value.fields["reason"])
    assert reasons == ["by_table_empty", "duplicate_rows"]


def test_arguments_that_say_nothing_are_refused():
    table = random_table(TOY)
    assert code_of(lambda: top_k(k=3)) == "table_needed"
    assert code_of(lambda: top_k(table, 3, by=table)) == "table_needed"
    assert code_of(lambda: threshold(table)) == "threshold_invalid"
    assert code_of(lambda: threshold(table, math.nan)) == "threshold_invalid"
    assert code_of(lambda: top_fraction(table, 1.5)) == "fraction_out_of_range"
    assert code_of(lambda: top_fraction(table, math.nan)) == "fraction_out_of_range"
    assert code_of(lambda: top_k(table, 3, rank="score")) == "rank_invalid"  # type: ignore[call-overload]
    assert code_of(lambda: top_k(table, 3, where="m3 &")) == "selector_syntax"
    assert top_k(k=3, by=table) == top_k(table, 3)


TABLE = random_table(TOY)
NAMES = ["input->m0"]
WRONG: list[tuple[str, Any, tuple[Any, ...], dict[str, Any]]] = [
    ("threshold_invalid", threshold, (TABLE, "a"), {}),
    ("edges_invalid", top_k, (TABLE, 3), {"pins": "input->m0"}),
    ("edges_invalid", top_k, (TABLE, 3), {"pins": 3}),
    ("edge_name_invalid", top_k, (TABLE, 3), {"pins": [3]}),
    ("where_invalid", top_k, (TABLE, 3), {"where": 3}),
    ("k_out_of_range", greedy, (TABLE, "3"), {}),
    ("fraction_out_of_range", cumulative_mass, (TABLE, "a"), {}),
    ("edge_table_invalid", top_k, (NAMES, 1), {}),
    ("edge_table_invalid", top_nodes, (top_k(TABLE, 9), 1), {}),
    ("circuit_invalid", auroc, (TABLE, NAMES), {}),
    ("circuit_invalid", prune, (NAMES,), {}),
    ("circuit_invalid", overlap, (top_k(TABLE, 9), NAMES), {}),
    ("universe_invalid", overlap, (top_k(TABLE, 9),) * 2, {"universe": TABLE}),
    ("edges_invalid", Circuit.from_edges, (5,), {}),
    ("edge_name_invalid", Circuit.from_edges, ([5],), {}),
    ("edge_name_invalid", Circuit, (frozenset([5]),), {}),
    ("circuit_text_invalid", Circuit.from_text, (Path("c.txt"),), {}),
]


@pytest.mark.parametrize(("code", "call", "given", "options"), WRONG)
def test_arguments_of_the_wrong_kind_are_refused(code, call, given, options):
    assert code_of(lambda: call(*given, **options)) == code


def test_another_kind_of_table_gives_its_own_selection():
    class Sites:
        def select(self, request: Request) -> tuple[str, ...]:
            assert isinstance(request.cut, TopK)
            return tuple("abc"[: request.cut.k]) + request.pins

    assert top_k(k=2, by=Sites()) == ("a", "b")
    assert top_k(Sites(), 1, pins=["z"]) == ("a", "z")


def test_provenance_is_plain_and_whole():
    table = random_table(TOY)
    found = top_k(table, 50, where="!m0->*", pins=["m0->logits"])
    provenance = json.loads(json.dumps(found.provenance))
    assert provenance == found.provenance
    assert provenance["run_id"] == table.run_id
    assert provenance["policy_digest"] == table.run.policy_digest
    assert provenance["method"] == "eap"
    assert provenance["reduction"] == "mean"
    assert provenance["target"]["name"] == "logit_diff"
    assert provenance["text"] == "top_k(k=50) rank=magnitude where='!(m0->*)'"
    assert provenance["k"] == 50
    assert provenance["selected"] == 50
    assert provenance["n"] == len(found)
    assert found.run is table.run


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
