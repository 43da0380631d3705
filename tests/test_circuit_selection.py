"""Which edges a selection keeps, in which order, and what it says of itself."""

from __future__ import annotations

import json
import math
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
from circuitlab.errors import ArgumentError
from circuitlab.ranking import Request, TopK
from circuitlab.sites import ModelShape, fed_by, parse_edge
from circuitlab.tables import EDGE, EdgeTable, Run
from tests.circuit_tables import (
    GROUPED,
    TOY,
    code_of,
    random_table,
    ranks,
    table_of,
    tables,
)

GOLDEN = Path(__file__).parent / "golden" / "gpt2_toy"
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
