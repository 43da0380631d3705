"""What is saved comes back: every table, every float, every name, whole and once."""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_tables import (
    GROUPED,
    SMALL,
    acts_of,
    edges_of,
    evals_of,
    prompts_of,
    run_of,
)

from circuitlab.circuits import Circuit, top_k
from circuitlab.errors import ArgumentError, CircuitlabError, DataError, StoreError
from circuitlab.kept import KEPT, OPEN
from circuitlab.records import Record
from circuitlab.run_rows import RUN
from circuitlab.spool import Event
from circuitlab.store import Store
from circuitlab.tables import (
    EDGE,
    EVAL,
    EdgeTable,
    Run,
    digest,
    edge_rows,
    git_commit,
)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs.duckdb")


@pytest.fixture(params=["spooled", "folded"])
def settle(request: pytest.FixtureRequest):
    """Both lives of a run: still in the spool, and folded into the database."""

    def settled(store: Store) -> None:
        if request.param == "folded":
            folded = store.fold()
            assert folded.pending == 0
            assert not folded.damaged

    return settled


def bits(table: pa.Table, column: str = "score") -> list[bytes | None]:
    values = table[column].to_pylist()
    return [None if v is None else struct.pack("<d", v) for v in values]


def test_an_edge_table_comes_back_bit_for_bit(store, settle):
    saved = edges_of(1)
    run_id = store.save(saved)
    settle(store)
    found = store.load(run_id)
    assert isinstance(found, EdgeTable)
    assert found.rows.schema == EDGE
    assert found.rows.equals(saved.rows)
    assert bits(found.rows) == bits(saved.rows)
    assert found.run == saved.run
    assert found.run_id == run_id == saved.run_id


@settings(
    max_examples=6,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    scores=st.lists(
        st.floats(allow_nan=True, allow_infinity=True, allow_subnormal=True, width=64),
        min_size=SMALL.n_edges,
        max_size=SMALL.n_edges,
    )
)
def test_any_float_survives(tmp_path_factory, scores):
    edge = [0.0, -0.0, 5e-324, -1.7976931348623157e308, math.inf, -math.inf]
    scores = [*edge, *scores][: SMALL.n_edges]
    rows = edge_rows(SMALL, np.array(scores), None, 1)
    store = Store(tmp_path_factory.mktemp("floats"))
    run_id = store.save(EdgeTable(rows, run_of()))
    before = bits(store.load(run_id).rows)
    store.fold()
    assert before == bits(rows) == bits(store.load(run_id).rows)


def test_two_shapes_share_one_store(store, settle):
    tables = [edges_of(1), edges_of(2, GROUPED), edges_of(3)]
    ids = [store.save(table) for table in tables]
    settle(store)
    for run_id, table in zip(ids, tables, strict=True):
        assert store.load(run_id).rows.equals(table.rows)


def test_a_part_of_the_edges_in_any_order_keeps_its_order(store, settle):
    whole = edges_of(4)
    picks = pa.array([5, 3, 40, 3, 11])
    rows = whole.rows.take(picks)
    positions = pa.array([0, 1, 2, 3, 4], pa.int32())
    rows = rows.set_column(6, "position", positions)
    run_id = store.save(EdgeTable(rows, whole.run))
    settle(store)
    assert store.load(run_id).rows.equals(rows)


def test_saving_twice_is_saving_once(store):
    ids = {store.save(edges_of(1)) for _ in range(3)}
    store.fold()
    ids |= {store.save(edges_of(1)) for _ in range(2)}
    store.fold()
    assert len(ids) == 1
    assert store.runs().num_rows == 1
    count = store.sql("select count(*) as n from v_edge").to_pylist()[0]["n"]
    assert count == SMALL.n_edges


def test_other_numbers_are_another_run_of_the_same_parameters(store):
    first, second = edges_of(1), edges_of(2)
    second = EdgeTable(second.rows, first.run)
    assert store.save(first) != store.save(second)
    params = store.runs()["params_digest"].to_pylist()
    assert len(params) == 2
    assert len(set(params)) == 1


def test_when_and_how_long_is_no_part_of_the_id(store):
    table = edges_of(1)
    later = dataclasses.replace(table.run, started_at="2030-01-01T00:00", seconds=9.0)
    assert store.save(table) == store.save(EdgeTable(table.rows, later))


def test_read_rows_come_back_with_their_provenance(store, settle):
    provenance = {
        "population_size": 40,
        "excluded_counts": {"not_upstream_of_target": 3},
        "aliases": [["a", "b"]],
        "batching_plan": {"size": 4, "reason": "cpu"},
        "autograd_calls": 2,
        "timing_s": {"read": 0.5},
        "result_bytes": 1234,
        "warnings": ["read_frozen_default_linearization"],
        "sample_count": 8,
        "infinite": math.inf,
    }
    run = run_of("act", provenance=provenance)
    rows = acts_of()
    run_id = store.save(Record(run, {"act": rows}))
    settle(store)
    found = store.load_record(run_id)
    assert found.tables["act"].equals(rows)
    assert found.run == run
    shown = store.sql("select * from v_act where run_id = ?", [run_id])
    for name in rows.column_names:
        assert shown[name].null_count < len(rows), name
    counts = store.sql(
        "select provenance ->> '$.excluded_counts.not_upstream_of_target' as n, "
        "(provenance ->> 'autograd_calls')::int as calls from v_run"
    ).to_pylist()
    assert counts == [{"n": "3", "calls": 2}]


def test_columns_that_the_store_does_not_know_come_back_too(store, settle):
    rows = acts_of(4)
    rows = rows.append_column("novel", pa.array([1.5, math.nan, None, -0.0]))
    rows = rows.append_column("listed", pa.array([["a"], [], None, ["b", "c"]]))
    run_id = store.save(Record(run_of("act"), {"act": rows}))
    settle(store)
    found = store.load_record(run_id).tables["act"]
    assert found.schema == rows.schema
    assert found.drop_columns("novel").equals(rows.drop_columns("novel"))
    assert bits(found, "novel") == bits(rows, "novel")


def test_a_circuit_comes_back_with_the_run_that_chose_it(store, settle):
    edges = edges_of(3)
    parent = store.save(edges)
    circuit = top_k(edges, 12)
    run_id = store.save(circuit)
    settle(store)
    found = store.load(run_id)
    assert isinstance(found, Circuit)
    assert found == circuit
    assert found.ordered == circuit.ordered
    assert found.run == edges.run
    assert found.provenance == circuit.provenance
    row = store.runs(kind="circuit").to_pylist()[0]
    assert row["parent"] == parent
    shown = store.sql(
        "select c.edge, e.score from v_circuit_edge c join v_run r using (run_id) "
        "join v_edge e on e.run_id = r.parent and e.edge = c.edge"
    )
    assert set(shown["edge"].to_pylist()) == circuit.edges


def test_a_circuit_without_a_run_or_a_shape_is_saved(store, settle):
    circuit = Circuit.from_edges(["input->m0", "m0->a1.h0<q>", "m0->logits"])
    run_id = store.save(circuit)
    settle(store)
    assert store.load(run_id) == circuit
    rows = store.sql("select * from v_circuit_edge order by edge").to_pylist()
    assert rows[1] == {
        "run_id": run_id,
        "edge": "m0->a1.h0<q>",
        "sender": "m0",
        "receiver": "a1.h0",
        "port": "q",
        "sender_layer": 0,
        "receiver_layer": 1,
    }


def test_an_equal_circuit_has_one_id_whenever_it_was_scored(store):
    edges = edges_of(3)
    again = dataclasses.replace(edges.run, started_at="2031-01-01", seconds=3.0)
    first, second = top_k(edges, 9), top_k(EdgeTable(edges.rows, again), 9)
    assert store.save(first) == store.save(second)


@dataclasses.dataclass(frozen=True)
class Evaluated:
    """What an evaluation looks like to a store."""

    rows: pa.Table
    per_example: pa.Table
    run: Run
    circuit: Circuit


def test_an_evaluation_keeps_its_examples_and_its_circuit(store, settle):
    circuit = top_k(edges_of(3), 7)
    rows, each = evals_of(circuit)
    run_id = store.save(Evaluated(rows, each, run_of("eval"), circuit))
    settle(store)
    found = store.load_record(run_id)
    assert found.tables["eval"].schema == EVAL
    assert found.tables["eval"].equals(rows)
    assert found.tables["per_example"].equals(each)
    kept = frozenset(found.tables["circuit_edge"]["edge"].to_pylist())
    assert kept == circuit.edges
    views = {
        view: store.sql(f"select count(*) as n from {view}").to_pylist()[0]["n"]
        for view in ("v_eval", "v_per_example", "v_circuit", "v_circuit_edge")
    }
    assert views == {
        "v_eval": 1,
        "v_per_example": 3,
        "v_circuit": 1,
        "v_circuit_edge": len(circuit),
    }


def test_prompts_are_saved_once_and_joined(store, settle):
    prompts = prompts_of()
    ids = [
        store.save(edges_of(seed, dataset_digest=prompts.digest), prompts=prompts)
        for seed in (1, 2)
    ]
    settle(store)
    found = store.load_prompts(prompts.digest)
    assert found.table.equals(prompts.table)
    assert found.digest == prompts.digest
    rows = store.sql(
        "select p.clean_tokens from v_prompt p join v_run r using (dataset_digest) "
        "where r.run_id = ? order by p.prompt",
        [ids[1]],
    )
    assert rows["clean_tokens"].to_pylist() == [list(ids) for ids in prompts.clean]


def test_unknown_prompts_are_refused(store):
    store.save(edges_of(1))
    with pytest.raises(StoreError) as refused:
        store.load_prompts("f" * 64)
    assert refused.value.code == "prompts_unknown"


def test_the_run_row_tells_where_the_numbers_are_from(store, settle):
    run_id = store.save(edges_of(7))
    settle(store)
    row = store.runs().to_pylist()[0]
    expected = {
        "run_id": run_id,
        "kind": "edge",
        "model": "toy",
        "architecture": "gpt2",
        "weights_digest": "w" * 64,
        "dtype": "float32",
        "processing": "raw",
        "backend": "transformer_lens",
        "n_layers": 2,
        "task": "ioi",
        "dataset_digest": "d" * 64,
        "n": 8,
        "metric": "logit_diff",
        "higher_is_better": True,
        "method": "eap_ig",
        "steps": 5,
        "rule": "midpoint",
        "ablation": "patch",
        "seed": 7,
        "seconds": 1.5,
        "circuitlab": "0.1.0",
        "torch": "2.13.0",
        "git_commit": "abc",
        "tags": [],
        "note": None,
    }
    assert {name: row[name] for name in expected} == expected
    assert row["policy_digest"] == edges_of(7).run.policy_digest
    assert row["started_at"].isoformat() == "2026-01-02T03:04:07"


def test_the_commit_of_a_checkout_is_found(tmp_path):
    assert git_commit(tmp_path) is None
    git, commit = tmp_path / ".git", "a1" * 20
    git.mkdir()
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/main\n")
    assert git_commit(tmp_path) == commit
    (git / "refs" / "heads").mkdir(parents=True)
    (git / "refs" / "heads" / "main").write_text("b2" * 20 + "\n")
    assert git_commit(tmp_path) == "b2" * 20
    (git / "HEAD").write_text("c3" * 20 + "\n")
    assert git_commit(tmp_path) == "c3" * 20


def test_runs_are_newest_first_and_filtered(store, settle):
    ids = [store.save(edges_of(seed)) for seed in range(4)]
    store.save(Circuit.from_edges(["input->m0"]))
    store.tag(ids[2], "good")
    settle(store)
    assert store.runs(kind="edge")["run_id"].to_pylist() == ids[::-1]
    assert store.runs(limit=1, kind="edge")["run_id"].to_pylist() == [ids[3]]
    assert store.runs(tag="good")["run_id"].to_pylist() == [ids[2]]
    assert store.runs(seed=1, task="ioi")["run_id"].to_pylist() == [ids[1]]
    with pytest.raises(ArgumentError) as refused:
        store.runs(colour="red")
    assert refused.value.code == "run_column_unknown"


def test_tags_and_notes(store, settle):
    run_id = store.save(edges_of(1))
    store.tag(run_id, "good", "paper")
    store.note(run_id, "first thought")
    settle(store)
    store.untag(run_id, "good")
    store.note(run_id, "second thought")
    row = store.runs().to_pylist()[0]
    assert (row["tags"], row["note"]) == (["paper"], "second thought")
    store.fold()
    row = store.runs().to_pylist()[0]
    assert (row["tags"], row["note"]) == (["paper"], "second thought")
    notes = store.sql("select note from v_note order by said_at")["note"].to_pylist()
    assert notes == ["first thought", "second thought"]


def test_a_deleted_run_is_gone_until_it_is_restored(store, settle):
    kept, gone = store.save(edges_of(1)), store.save(edges_of(2))
    settle(store)
    store.delete(gone)
    for _ in range(2):
        assert store.runs()["run_id"].to_pylist() == [kept]
        assert store.sql("select distinct run_id from v_edge").num_rows == 1
        assert store.sql("select run_id from v_tombstone").num_rows == 1
        with pytest.raises(StoreError) as refused:
            store.load(gone)
        assert refused.value.code == "run_unknown"
        store.fold()
    store.restore(gone)
    assert store.load(gone).rows.equals(edges_of(2).rows)
    store.fold()
    assert store.runs().num_rows == 2


def test_saving_a_deleted_run_again_brings_it_back(store, settle):
    run_id = store.save(edges_of(1))
    settle(store)
    store.delete(run_id)
    assert store.runs().num_rows == 0
    assert store.save(edges_of(1)) == run_id
    assert store.runs().num_rows == 1
    store.fold()
    assert store.runs().num_rows == 1
    store.delete(run_id)
    store.fold()
    assert store.runs().num_rows == 0


def test_ids_may_be_cut_short(store, settle):
    run_id = store.save(edges_of(1))
    store.save(edges_of(2))
    settle(store)
    assert store.load(run_id[:6]).run_id == run_id
    assert store.resolve(run_id[:9]) == run_id
    for wrong, code in [("abc", "run_id_too_short"), ("zzzzzz", "run_unknown")]:
        with pytest.raises(StoreError) as refused:
            store.load(wrong)
        assert refused.value.code == code


def test_an_ambiguous_beginning_names_the_runs(store):
    record = Record(run_of("act"), {"act": acts_of(1)})
    for end in "ab":
        made = dataclasses.replace(record)
        object.__setattr__(made, "run_id", "123456" + end * 26)
        store.save(made)
    with pytest.raises(StoreError) as refused:
        store.resolve("123456")
    assert refused.value.code == "run_ambiguous"
    assert len(refused.value.fields["expected"]) == 2  # type: ignore[arg-type]


def test_spooled_and_folded_runs_are_one(store):
    first = store.save(edges_of(1))
    store.fold()
    second = store.save(edges_of(2))
    rows = store.sql(
        "select run_id, count(*) as n from v_edge group by run_id"
    ).to_pylist()
    assert {row["run_id"]: row["n"] for row in rows} == dict.fromkeys(
        (first, second), SMALL.n_edges
    )
    joined = store.sql(
        "select count(*) as n from v_edge a join v_edge b using (edge) "
        "where a.run_id = ? and b.run_id = ?",
        [first, second],
    )
    assert joined.to_pylist() == [{"n": SMALL.n_edges}]


def test_the_views_are_the_same_before_and_after_folding(store):
    prompts = prompts_of()
    edges = edges_of(1, dataset_digest=prompts.digest)
    circuit = top_k(edges, 9)
    rows, each = evals_of(circuit)
    store.save(edges, prompts=prompts)
    store.save(circuit)
    store.save(Record(run_of("act"), {"act": acts_of()}))
    store.save(Evaluated(rows, each, run_of("eval"), circuit))
    views = [
        "v_run",
        "v_edge",
        "v_act",
        "v_eval",
        "v_per_example",
        "v_circuit",
        "v_circuit_edge",
        "v_prompt",
        "v_dataset",
    ]

    def shown() -> dict[str, pa.Table]:
        return {view: store.sql(f"from {view} order by all") for view in views}

    before = shown()
    store.fold()
    after = shown()
    for view in views:
        assert before[view].schema.names == after[view].schema.names, view
        assert before[view].to_pylist() == after[view].to_pylist(), view
        assert before[view].num_rows > 0


def test_nothing_is_made_before_the_first_save(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CIRCUITLAB_STORE", raising=False)
    with Store() as store:
        with pytest.raises(StoreError) as refused:
            store.runs()
        assert refused.value.code == "store_missing"
        assert store.fold().runs == 0
        assert store.check().ok
    assert list(tmp_path.iterdir()) == []
    with Store() as store:
        store.save(edges_of(1))
    assert (tmp_path / "store" / "circuitlab.duckdb").exists()


def test_the_environment_names_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("CIRCUITLAB_STORE", str(tmp_path / "mine.duckdb"))
    with Store() as store:
        store.save(edges_of(1))
    assert (tmp_path / "mine.duckdb").exists()
    assert Store(tmp_path / "mine.duckdb").runs().num_rows == 1


def test_a_plain_duckdb_reads_the_file(store):
    with store:
        run_id = store.save(edges_of(1))
    with duckdb.connect(store.path, read_only=True) as shell:
        found = shell.execute(
            "select edge, score from v_edge where run_id = ? "
            "order by abs(score) desc limit 10",
            [run_id],
        ).fetchall()
        storage = shell.execute("select tags from duckdb_databases()").fetchall()
    best = store.query("top_edges", run=run_id, k=10).to_pylist()
    assert found == [(row["edge"], row["score"]) for row in best]
    assert any("v1.5.0" in str(tags) for (tags,) in storage)


def test_closing_folds(store):
    with store:
        store.save(edges_of(1))
        assert not Path(store.path).exists()
    assert Path(store.path).exists()
    assert store.spool.entries() == ([], [])


def test_sql_parameters_are_bound(store):
    run_id = store.save(edges_of(1))
    by_name = store.sql(
        "select count(*) as n from v_edge where run_id = $r", {"r": run_id}
    )
    by_place = store.sql("select count(*) as n from v_edge where run_id = ?", [run_id])
    assert by_name.equals(by_place)
    assert store.sql("select ? as text", ["'; drop table run; --"]).num_rows == 1


@pytest.mark.parametrize(
    ("query", "code"),
    [
        ("selekt 1", "sql_failed"),
        ("select nothing from v_run", "sql_failed"),
        ("select * from v_edge where run_id = ?", "sql_failed"),
        ("select 1; select 2", "sql_not_read_only"),
        ("", "sql_not_read_only"),
        ("delete from run", "sql_not_read_only"),
        ("create table x (i int)", "sql_not_read_only"),
        ("copy (select 1) to 'out.csv'", "sql_not_read_only"),
        ("attach 'other.duckdb'", "sql_not_read_only"),
        ("set threads = 1", "sql_not_read_only"),
    ],
)
def test_sql_that_fails_says_so_in_one_error(store, query, code):
    store.save(edges_of(1))
    with pytest.raises(StoreError) as refused:
        store.sql(query)
    assert refused.value.code == code
    assert refused.value.fields["query"] == query


def test_explain_and_describe_are_reading(store):
    store.save(edges_of(1))
    assert store.sql("explain select * from v_edge").num_rows > 0
    assert store.sql("describe v_run")["column_name"].to_pylist()[0] == "run_id"


@pytest.mark.parametrize(
    ("thing", "code"),
    [
        (object(), "not_savable"),
        (pa.table({"a": [1]}), "not_savable"),
        (7, "not_savable"),
    ],
)
def test_what_cannot_be_saved_is_refused(store, thing, code):
    with pytest.raises(CircuitlabError) as refused:
        store.save(thing)
    assert refused.value.code == code
    assert not Path(store.path).exists()


def test_rows_without_a_run_are_refused(store):
    class Rows:
        rows = acts_of(1)
        run = None

    with pytest.raises(DataError) as refused:
        store.save(Rows())
    assert refused.value.code == "run_missing"


def test_an_edge_row_that_contradicts_itself_is_refused(store):
    table = edges_of(1)
    layers = pa.array([7] * len(table), pa.int32())
    rows = table.rows.set_column(4, "sender_layer", layers)
    with pytest.raises(DataError) as refused:
        store.save(EdgeTable(rows, table.run))
    assert refused.value.code == "edge_row_invalid"
    renamed = pa.array([*table.rows["edge"].to_pylist()[:-1], "m0->logits"])
    rows = table.rows.set_column(0, "edge", renamed)
    with pytest.raises(DataError) as refused:
        store.save(EdgeTable(rows, table.run))
    assert refused.value.code == "edge_row_invalid"
    assert refused.value.fields["row"] == len(table) - 1


def test_the_database_has_every_column_that_is_kept(store):
    with store:
        store.save(edges_of(1))
    with duckdb.connect(store.path, read_only=True) as con:
        found = con.execute("select table_name, column_name from duckdb_columns()")
        columns: dict[str, set[str]] = {}
        for table, column in found.fetchall():
            columns.setdefault(table, set()).add(column)
    for table, schema in KEPT.items():
        through = {"edge": "edge_name", "circuit_edge": "edge_name", "act": "site"}
        there = columns[table] | columns.get(through.get(table, ""), set())
        assert set(schema.names) <= there, table
        assert (table in OPEN) == ("more" in columns[table])
    assert set(RUN.names) == columns["run"] - {"run_no"}


def test_threads_save_and_read_at_once(store):
    errors: list[BaseException] = []

    def work(first: int) -> None:
        try:
            for seed in range(first, first + 4):
                run_id = store.save(edges_of(seed))
                assert store.load(run_id).run_id == run_id
                store.fold(wait=0.0)
        except BaseException as error:  # noqa: BLE001 (handed to the test)
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n * 100,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert store.runs().num_rows == 16


def test_events_say_when_in_order():
    first, second = Event.now("r", "tag", "a"), Event.now("r", "untag", "a")
    assert first.at <= second.at
    assert first.event_id != second.event_id
    assert digest(first.at) is not None
