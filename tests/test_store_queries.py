"""Every named query runs, is documented, and answers what it says."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from store_tables import SMALL, acts_of, edges_of, evals_of, prompts_of, run_of
from test_store import Evaluated

from circuitlab.circuits import top_k
from circuitlab.errors import ArgumentError, StoreError
from circuitlab.queries import named_queries, named_query
from circuitlab.records import Record
from circuitlab.store import Store
from circuitlab.tables import EdgeTable, edge_rows

DOCS = Path(__file__).parent.parent / "docs" / "sql.md"


@dataclasses.dataclass(frozen=True)
class Filled:
    """A store with one run of each kind, and their ids."""

    store: Store
    first: str
    second: str
    exact: str
    circuit: str
    evaluation: str
    read: str


@pytest.fixture(scope="module", params=["spooled", "folded"])
def filled(request, tmp_path_factory) -> Filled:
    store = Store(tmp_path_factory.mktemp("queries") / "runs.duckdb")
    prompts = prompts_of()
    edges = edges_of(1, dataset_digest=prompts.digest)
    twice = edge_rows(SMALL, np.nan_to_num(edges.scores) * 2, None, 8)
    other = edges_of(2, dataset_digest=prompts.digest)
    exact = EdgeTable(twice, dataclasses.replace(edges.run, policy={"method": "exact"}))
    circuit = top_k(edges, 9, prune=False)
    rows, each = evals_of(circuit)
    run = run_of("eval", dataset_digest=prompts.digest)
    made = Filled(
        store,
        first=store.save(edges, prompts=prompts),
        second=store.save(other),
        exact=store.save(exact),
        circuit=store.save(circuit),
        evaluation=store.save(Evaluated(rows, each, run, circuit)),
        read=store.save(Record(run_of("act"), {"act": acts_of()})),
    )
    if request.param == "folded":
        store.fold()
    return made


def arguments(filled: Filled) -> Mapping[str, Mapping[str, object]]:
    """What each query that needs parameters is given here."""
    pair = {"run_a": filled.first, "run_b": filled.second}
    exact = {"run": filled.first, "run_exact": filled.exact}
    return {
        "agreement_with_exact": exact,
        "circuit_with_scores": {"run": filled.circuit},
        "curve": {"run": filled.evaluation},
        "edge_history": {"edge": "m0->logits"},
        "hard_prompts": {"run": filled.evaluation},
        "overlap": pair,
        "rank_stability": {"task": "ioi"},
        "scores_beside_exact": exact,
        "scores_side_by_side": pair,
        "top_sites": {"run": filled.read},
    }


@pytest.mark.parametrize("name", sorted(named_queries()))
def test_every_named_query_runs_and_finds_something(filled, name):
    given = arguments(filled).get(name, {})
    query = named_query(name)
    if "run" in query.names and "run" not in given:
        given = {"run": filled.first[:8]}
    found = filled.store.query(name, **given)
    assert found.num_rows > 0
    assert query.about.endswith(".")
    assert all(parameter.meaning for parameter in query.parameters)


@pytest.mark.parametrize("name", sorted(named_queries()))
def test_every_named_query_is_documented(name):
    text = DOCS.read_text(encoding="utf-8")
    assert f"`@{name}`" in text
    for parameter in named_query(name).parameters:
        assert f"`{parameter.name}`" in text


def test_every_view_is_documented():
    from circuitlab.migrations import migrations, views

    text = DOCS.read_text(encoding="utf-8")
    for view in views(migrations()):
        assert not view.startswith("v_") or f"`{view}`" in text, view


def test_top_edges_are_the_largest(filled):
    edges = edges_of(1)
    rows = filled.store.query("top_edges", run=filled.first, k=5).to_pylist()
    order = np.argsort(-np.nan_to_num(np.abs(edges.scores)), kind="stable")[:5]
    names = edges.rows["edge"].to_pylist()
    assert [row["edge"] for row in rows] == [names[i] for i in order]


def test_helping_edges_turn_the_sign(filled):
    edges = edges_of(1)
    rows = filled.store.query("helping_edges", run=filled.first, k=3).to_pylist()
    best = np.sort(np.nan_to_num(edges.support, nan=-np.inf))[::-1][:3]
    assert [row["support"] for row in rows] == best.tolist()


def test_heads_sum_their_edges(filled):
    sums: dict[str, float] = defaultdict(float)
    for row in edges_of(1).rows.to_pylist():
        if row["sender"].startswith("a") and row["status"] == "ok":
            sums[row["sender"]] += row["score"]
    rows = filled.store.query("heads_by_total_effect", run=filled.first).to_pylist()
    assert {row["head"] for row in rows} == set(sums)
    for row in rows:
        assert row["total_effect"] == pytest.approx(sums[row["head"]], rel=1e-12)


def test_overlap_counts_what_both_hold(filled):
    one, two = edges_of(1), edges_of(2)
    tops = [
        set(top_k(table, 12, prune=False, rank="magnitude").edges)
        for table in (one, two)
    ]
    row = filled.store.query(
        "overlap", run_a=filled.first, run_b=filled.second, k=12
    ).to_pylist()[0]
    both = len(tops[0] & tops[1])
    assert (row["in_a"], row["in_b"], row["in_both"]) == (12, 12, both)
    assert row["iou"] == pytest.approx(both / (24 - both))
    row = filled.store.query("overlap", run_a=filled.first, run_b=filled.first, k=7)
    assert row["iou"].to_pylist() == [1.0]


def test_unreachable_edges_are_counted(filled):
    rows = filled.store.query("unreachable_edges", run=filled.first).to_pylist()
    status = edges_of(1).rows["status"].to_pylist()
    assert sum(row["edges"] for row in rows) == status.count("unreachable")
    assert {row["status"] for row in rows} == {"unreachable"}


def test_exact_effects_stand_beside_scores(filled):
    given = {"run": filled.first, "run_exact": filled.exact}
    rows = filled.store.query("scores_beside_exact", **given, k=4).to_pylist()
    assert [row["exact"] for row in rows] == [2 * row["score"] for row in rows]
    row = filled.store.query("agreement_with_exact", **given).to_pylist()[0]
    assert row["rank_correlation"] == pytest.approx(1.0)
    assert row["correlation"] == pytest.approx(1.0)


def test_faithful_circuits_within_a_size(filled):
    found = filled.store.query("faithful_circuits", faithfulness=0.9, edges=9)
    assert found["run_id"].to_pylist() == [filled.evaluation]
    assert filled.store.query("faithful_circuits", edges=8).num_rows == 0
    assert filled.store.query("faithful_circuits", faithfulness=0.91).num_rows == 0


def test_an_edge_has_a_history(filled):
    rows = filled.store.query("edge_history", edge="m0->logits").to_pylist()
    assert [row["seed"] for row in rows] == [1, 1, 2]
    assert {row["run_id"] for row in rows} == {
        filled.first,
        filled.second,
        filled.exact,
    }
    assert filled.store.query("edge_history", edge="m0->logits", task="x").num_rows == 0


def test_ranks_over_runs(filled):
    rows = filled.store.query("rank_stability", task="ioi", k=5).to_pylist()
    assert {row["runs"] for row in rows} <= {2, 3}
    assert rows == sorted(rows, key=lambda row: (row["mean_rank"], row["edge"]))


def test_hard_prompts_show_their_tokens_or_text(filled):
    rows = filled.store.query("hard_prompts", run=filled.evaluation).to_pylist()
    assert [row["prompt"] for row in rows] == [2, 1, 0]


@pytest.mark.parametrize(
    ("name", "given", "code"),
    [
        ("no_such_query", {}, "query_unknown"),
        ("top_edges", {}, "query_parameter_missing"),
        ("top_edges", {"run": "abcdef0", "colour": 1}, "query_parameter_unknown"),
        ("faithful_circuits", {"edges": "many"}, "query_parameter_invalid"),
    ],
)
def test_wrong_names_and_parameters(filled, name, given, code):
    with pytest.raises(ArgumentError) as refused:
        filled.store.query(name, **given)
    assert refused.value.code == code


def test_numbers_may_be_written_as_text(filled):
    """As the command line gives them."""
    found = filled.store.query("top_edges", run=filled.first, k="3")
    assert found.num_rows == 3
    assert filled.store.query("faithful_circuits", faithfulness="0.5").num_rows == 1


def test_an_unknown_run_is_an_error_and_not_an_empty_answer(filled):
    with pytest.raises(StoreError) as refused:
        filled.store.query("top_edges", run="zzzzzzzz")
    assert refused.value.code == "run_unknown"


def test_names_may_be_written_as_on_the_command_line():
    assert named_query("@top-edges") == named_query("top_edges")
    with pytest.raises(ArgumentError):
        named_query("@")
