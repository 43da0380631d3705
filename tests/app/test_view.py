"""Views as URLs, and the circuits and pictures they mean."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from stores import GPT2, GROUPED, SMALL, busy_heads, edge_table
from view import CAP, View, picture, rank_circuit, rank_table, select

from circuitlab.circuits import Circuit, top_k


def ranked_of(table, view: View):
    return rank_table(
        table, rank=view.rank, where=view.where, pins=view.edge_pins, run_id="r"
    )


VIEWS = [
    View(run="abc"),
    View(run="abc", k=0, rank="support", where="m*->logits & |score|>0.1", prune=False),
    View(
        run="abc",
        k=12,
        hide=("a1.h2", "m0->a1.h0<q>"),
        pins=("a0.h1", "input->m0"),
        groups=(("early heads", ("a0.h0", "a0.h1")),),
        selected="m2->logits",
        through=True,
    ),
]


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_is_its_url(view):
    assert View.of(view.params()) == view


@pytest.mark.parametrize("view", VIEWS[1:])
def test_what_the_browser_holds_reads_back(view):
    said = json.dumps({**view.state(view.k or 0), "seq": 3})
    other = View(run="abc", rank=view.rank, where=view.where, prune=view.prune)
    assert other.changed(said) == view


@pytest.mark.parametrize("said", ["", "[]", "{}", '{"k": "x"}', "<b>", '{"k": 1}'])
def test_nonsense_from_the_browser_changes_nothing(said):
    assert VIEWS[2].changed(said) == VIEWS[2]


def test_a_mangled_url_still_shows_something():
    params = {"k": "-3", "hide": "<script>,a0.h0,zzz", "sel": "a0->->", "groups": "x:y"}
    found = View.of({**params, "pins": "a0.h0,a0.h0"})
    assert found == View(hide=("a0.h0",), pins=("a0.h0",))


@pytest.mark.parametrize("shape", [SMALL, GROUPED])
@pytest.mark.parametrize("rank", ["magnitude", "support"])
@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("k", [0, 1, 30, 70])
def test_a_view_keeps_what_top_k_keeps(shape, rank, prune, k):
    table = edge_table(shape)
    pins = ("input->m0",)
    where = "!m1->*"
    view = View(k=k, rank=rank, prune=prune, pins=pins, where=where)
    chosen = select(ranked_of(table, view), view)
    expected = top_k(table, k, rank=rank, prune=prune, pins=pins, where=where)
    assert frozenset(chosen.kept) == expected.edges
    assert chosen.dangling == expected.provenance.get("dangling", 0)


def test_what_is_hidden_takes_what_hangs_on_it():
    table = edge_table(SMALL)
    view = View(k=60)
    ranked = ranked_of(table, view)
    whole = set(select(ranked, view).kept)
    head = busy_heads(table, 60)[0]
    hidden = select(ranked, replace(view, hide=(head,)))
    assert set(hidden.kept) < whole
    assert not any(head in name for name in hidden.kept)
    assert hidden.hidden > 0


def test_the_circuit_says_how_it_came_about():
    table = edge_table(SMALL)
    view = View(k=20, hide=("m0",))
    ranked = ranked_of(table, view)
    circuit = select(ranked, view).circuit(ranked, view)
    assert circuit.run == table.run
    assert circuit.provenance["hidden"] == ["m0"]
    assert circuit.n_requested == 20
    assert Circuit.from_json(json.loads(json.dumps(circuit.to_json()))) == circuit


@pytest.mark.parametrize("k", [100, CAP, CAP + 1, 20_000])
def test_pictures_hold_at_most_the_cap(k):
    table = edge_table(GPT2)
    view = View(k=k)
    ranked = ranked_of(table, view)
    chosen = select(ranked, view)
    drawn = picture(ranked, view, chosen)
    drawable = len(chosen.kept) if k > CAP else CAP
    assert len(drawn["s"]) == len(drawn["v"]) == min(CAP, drawable)
    assert drawn["exact"] == (k > CAP)
    names = [
        f"{drawn['names'][s]}->{drawn['names'][t]}" + ["", "<q>", "<k>", "<v>"][p]
        for s, t, p in zip(drawn["s"], drawn["t"], drawn["p"], strict=True)
    ]
    expected = chosen.kept if k > CAP else ranked.names
    assert names == list(expected[:CAP])
    assert len(json.dumps(drawn)) < 120_000


def test_keys_fall_along_the_ranking():
    ranked = ranked_of(edge_table(GPT2), View())
    sizes, keys = zip(
        *picture(ranked, View(), select(ranked, View()))["keys"], strict=True
    )
    assert list(keys) == sorted(keys, reverse=True)
    assert sizes[0] == 1
    assert sizes[-1] == GPT2.n_edges


def test_key_and_value_groups_are_drawn_with_the_heads_they_feed():
    ranked = ranked_of(edge_table(GROUPED), View())
    drawn = picture(ranked, View(), select(ranked, View()))
    group = drawn["names"].index("a0.kv1")
    assert [drawn["names"][i] for i in drawn["fed"][str(group)]] == ["a0.h2", "a0.h3"]


def test_a_stored_circuit_is_ranked_by_its_scores():
    table = edge_table(SMALL)
    circuit = top_k(table, 30)
    found = rank_circuit(circuit, table, "magnitude", "r")
    assert set(found.names) == circuit.edges
    assert list(found.keys) == sorted(found.keys, reverse=True)
    bare = rank_circuit(Circuit.from_edges(circuit.edges), None, "magnitude", "")
    assert set(bare.names) == circuit.edges
    assert np.isnan(bare.scores).all()
    assert bare.shape.n_layers == 3
    assert select(bare, View()).kept
