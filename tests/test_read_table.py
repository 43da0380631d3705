"""Read tables: the mapping, its operations, JSON, the store, and what ranks sites."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from circuitlab.circuits import Circuit, threshold, top_fraction, top_k
from circuitlab.errors import ArgumentError, CircuitlabError, DataError
from circuitlab.read_table import ReadTable
from circuitlab.site_selection import SiteSelection
from circuitlab.sites import ModelShape
from circuitlab.store import Store
from circuitlab.tables import ACT, EdgeTable, ModelInfo, Run, edge_rows

SHAPE = ModelShape(2, 2, 2, 8, 4, 11)
INFO = ModelInfo("tiny", "GPT2LMHeadModel", "w" * 64, "float64", "test", SHAPE)
NAN, INF = math.nan, math.inf
SITES = [
    "embed.hook_out",
    "blocks.0.hook_in",
    "blocks.0.attn.hook_pattern",
    "blocks.0.mlp.hook_out",
    "blocks.1.hook_in",
    "ln_final.hook_out",
]


def table(
    scores: list[float | None],
    *,
    targets: int = 1,
    status: list[str] | None = None,
    values: dict[int, Any] | None = None,
    samples: list[str | None] | None = None,
    alias: list[str | None] | None = None,
) -> ReadTable:
    """A hand-made ACT table: one row a score, target by target."""
    count = len(scores)
    per_target = count // targets
    sites = [SITES[i % per_target] for i in range(count)]
    examples: list[str | None] = samples or [None for _ in range(count)]
    tail = [f"#{s}" if s else "" for s in examples]
    element = values is not None
    columns: dict[str, list[Any]] = {
        "target_id": [f"t{i // per_target}" for i in range(count)],
        "kind": ["ACT"] * count,
        "address": [f"{s}:1{t}" for s, t in zip(sites, tail, strict=True)],
        "site": sites,
        "pass": [1] * count,
        "sample_id": examples,
        "site_key": [f"s1|{s}|out|1" for s in sites],
        "alias_group": alias or [None] * count,
        "method": ["grad"] * count,
        "reduction": [None if element else "sum"] * count,
        "grain": ["element" if element else "site"] * count,
        "score": scores,
        "n": [3] * count,
        "shape": ["2x3"] * count,
        "dtype": ["float64"] * count,
        "device": ["cpu"] * count,
        "status": status or ["unreachable" if s is None else "ok" for s in scores],
        "differentiable": [True] * count,
        "retention": ["retained"] * count,
        "capture_status": ["captured"] * count,
        "resolution": ["exact"] * count,
        "frozen_requested": [2] * count,
        "frozen_resolved": [4] * count,
        "frozen_reached": [1] * count,
        "policy_digest": ["d" * 64] * count,
        "detached": [True] * count,
        "rescorable": [True] * count,
    }
    arrays = [pa.array(columns.get(f.name, [None] * count), f.type) for f in ACT]
    provenance = {"excluded_counts": {"not_upstream_of_target": 2}, "sample_count": 3}
    provenance |= {"target_reprs": {"t0": "seed"}, "spellings": {SITES[1]: ["resid"]}}
    run = Run("act", INFO, "toy", "f" * 64, 3, {"method": "grad"}, provenance)
    return ReadTable(pa.table(arrays, schema=ACT), run, values or {})


def edges() -> EdgeTable:
    score = np.linspace(-1, 1, SHAPE.n_edges)
    policy = {
        "method": "eap",
        "metric": {"name": "logit_diff", "higher_is_better": True},
        "reduction": "sum_positions_mean_examples",
    }
    run = Run("edge", INFO, "toy", "f" * 64, 5, policy, {"sample_count": 5})
    return EdgeTable(edge_rows(SHAPE, score, np.abs(score) / 10, 5), run)


def refusal(call, *args, **options) -> CircuitlabError:
    with pytest.raises(CircuitlabError) as found:
        call(*args, **options)
    return found.value


# --- the mapping ---


def test_rows_are_keyed_by_target_kind_and_address():
    found = table([1.0, 2.0, 3.0, 4.0], targets=2)
    key = ("t1", "ACT", ("embed.hook_out", 1))
    assert list(found)[2] == key
    assert found[key].score == 3.0
    assert len(found) == 4
    assert key in found
    assert ("t2", "ACT", ("embed.hook_out", 1)) not in found
    assert [row.score for row in found.values()] == [1.0, 2.0, 3.0, 4.0]
    assert found.target("t0")["embed.hook_out"].score == 1.0
    assert found.target("t0")["embed.hook_out:1"].score == 1.0
    assert found.target("t0")["embed"].score == 1.0
    assert found.target("t0")["resid"].score == 2.0
    assert found[key].shape == (2, 3)
    error = refusal(found.__getitem__, "embed.hook_out")
    assert error.code == "read_table_key_ambiguous"
    with pytest.raises(KeyError):
        found["nowhere"]
    assert refusal(found.__getitem__, key[:2]).code == "read_table_key_unknown"


def test_examples_extend_the_address():
    found = table([1.0, 2.0], samples=["0", "1"])
    assert list(found)[1] == ("t0", "ACT", ("blocks.0.hook_in", 1, "1"))


def test_a_table_is_immutable_and_its_keys_are_unique():
    found = table([1.0, 2.0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.run = found.run  # type: ignore[misc]
    twice = pa.concat_tables([found.rows, found.rows])
    assert refusal(ReadTable, twice, found.run).code == "read_table_duplicate"
    fewer = found.rows.drop_columns(["dtype"])
    assert refusal(ReadTable, fewer, found.run).code == "read_table_schema_invalid"


# --- operations ---


def test_targets_and_columns():
    found = table([1.0, None, 3.0, 4.0], targets=2)
    assert found.target_ids == ("t0", "t1")
    assert found.status_counts == {"ok": 3, "unreachable": 1}
    assert found.column("score") == [1.0, None, 3.0, 4.0]
    assert found.column("address")[0] == ("embed.hook_out", 1)
    assert found.column("rescorable") == [False] * 4
    assert refusal(found.target, "t9").code == "read_table_target_unknown"
    assert refusal(found.column, "size").code == "read_table_column_unknown"


def test_frames_in_three_modes():
    values = {0: np.arange(6.0).reshape(2, 3), 1: np.ones((2, 3))}
    dense = table([None, None], values=values, status=["ok", "ok"])
    assert "value" not in dense.to_pandas()
    objects = dense.to_pandas("object")
    assert objects["value"][0] is values[0]
    exploded = dense.to_pandas("explode")
    assert len(exploded) == 12
    assert exploded["element"].tolist()[:4] == ["0,0", "0,1", "0,2", "1,0"]
    assert exploded["score"].tolist()[:6] == [0, 1, 2, 3, 4, 5]
    assert dense.to_pandas().attrs["sample_count"] == 3
    error = refusal(dense.to_pandas, "all")
    assert error.code == "read_table_values_mode_invalid"


def test_targets_are_folded_only_by_a_reducer_you_name():
    found = table([1.0, 2.0, None, 4.0, -6.0, 6.0], targets=2)
    folded = found.aggregate_targets(max, name="largest")
    assert folded.target_ids == (None,)
    assert folded.column("score") == [4.0, 2.0, None]
    assert folded.column("reduction") == ["sum|largest"] * 3
    assert folded[None, "ACT", (SITES[2], 1)].status == "unreachable"
    error = refusal(found.aggregate_targets, lambda _: "much")
    assert error.code == "read_table_reducer_invalid"
    dense = table([None], values={0: np.ones(6)}, status=["ok"])
    error = refusal(dense.aggregate_targets, max)
    assert error.code == "read_table_grain_unaggregatable"


def test_alias_groups_collapse_to_their_first_member():
    groups = ["g", "g", None, "g"]
    found = table([2.0, 2.0, 5.0, 2.0], alias=groups).collapse_alias_groups()
    assert [address[0] for _, _, address in found] == [SITES[0], SITES[2]]
    nans = table([NAN, NAN], alias=["g", "g"]).collapse_alias_groups()
    assert len(nans) == 1
    bad = table([2.0, 2.5], alias=["g", "g"])
    assert refusal(bad.collapse_alias_groups).code == "read_alias_conflict"


# --- JSON ---

numbers = st.one_of(
    st.none(),
    st.just(NAN),
    st.floats(allow_nan=False, allow_infinity=True, width=64),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(numbers, min_size=0, max_size=6))
def test_every_scalar_table_survives_json(scores: list[float | None]):
    found = table(scores)
    again = ReadTable.from_json(found.to_json())
    assert again.rows.equals(found.rows) or np.array_equal(
        again.scores, found.scores, equal_nan=True
    )
    assert again.rows.drop_columns(["score"]).equals(found.rows.drop_columns(["score"]))
    assert again.run_id == found.run_id
    assert again.run == dataclasses.replace(found.run)
    assert not again.rescorable
    assert again.to_json() == found.to_json()


def test_the_seeds_columns_stand_apart_from_ours():
    value = json.loads(table([NAN, -INF, None]).to_json())
    assert sorted(value) == ["circuitlab", "provenance", "rows", "schema_version"]
    row = value["rows"][0]
    assert row["score"] == {"float": "nan"}
    assert value["rows"][1]["score"] == {"float": "-inf"}
    assert row["address"] == ["embed.hook_out", 1]
    assert row["value"] is None
    assert len(row) == 26
    assert len(value["provenance"]) == 21
    assert value["provenance"]["rescorable"] is False
    assert sorted(value["circuitlab"]) == ["columns", "run"]
    # Without our object the table still loads, knowing less.
    del value["circuitlab"]
    bare = ReadTable.from_json(json.dumps(value))
    assert bare.run.model.name == ""
    assert math.isnan(bare["embed.hook_out"].score or 0.0)


def edited(change) -> str:
    value = json.loads(table([1.0, None]).to_json())
    change(value)
    return json.dumps(value)


def drop(value: Any, *path: Any) -> None:
    *way, last = path
    for step in way:
        value = value[step]
    del value[last]


def put(value: Any, new: Any, *path: Any) -> None:
    *way, last = path
    for step in way:
        value = value[step]
    value[last] = new


BROKEN = {
    "not JSON": lambda: "{",
    "NaN token": lambda: edited(lambda v: None).replace("1.0", "NaN", 1),
    "not an object": lambda: "[]",
    "deep": lambda: "[" * 100_000,
    "not text": lambda: b"\xff\xfe",
    "twice a key": lambda: '{"rows": [], "rows": []}',
    "schema": lambda: edited(lambda v: put(v, "v2", "schema_version")),
    "no provenance": lambda: edited(lambda v: drop(v, "provenance")),
    "provenance empty": lambda: edited(lambda v: put(v, {}, "provenance")),
    "rows no list": lambda: edited(lambda v: put(v, {}, "rows")),
    "row no object": lambda: edited(lambda v: put(v, 3, "rows", 0)),
    "missing field": lambda: edited(lambda v: drop(v, "rows", 0, "dtype")),
    "unknown field": lambda: edited(lambda v: put(v, 1, "rows", 0, "extra")),
    "unknown top": lambda: edited(lambda v: put(v, 1, "extra")),
    "kind": lambda: edited(lambda v: put(v, "NODE", "rows", 0, "kind")),
    "mixed kinds": lambda: edited(
        lambda v: v["rows"][0].update(
            kind="EDGE",
            address=["input->m0"],
            reduction="sum_positions_mean_examples",
        )
    ),
    "status": lambda: edited(lambda v: put(v, "fine", "rows", 0, "status")),
    "resolution": lambda: edited(lambda v: put(v, "vague", "rows", 0, "resolution")),
    "grain": lambda: edited(lambda v: put(v, "element", "rows", 0, "grain")),
    "method": lambda: edited(lambda v: put(v, "guess", "rows", 0, "method")),
    "reduction": lambda: edited(lambda v: put(v, "total", "rows", 0, "reduction")),
    "text score": lambda: edited(lambda v: put(v, "1.0", "rows", 0, "score")),
    "bool score": lambda: edited(lambda v: put(v, True, "rows", 0, "score")),
    "ok without score": lambda: edited(lambda v: put(v, None, "rows", 0, "score")),
    "score without ok": lambda: edited(lambda v: put(v, 1.0, "rows", 1, "score")),
    "tag": lambda: edited(lambda v: put(v, {"float": "huge"}, "rows", 0, "score")),
    "value": lambda: edited(lambda v: put(v, [1.0], "rows", 0, "value")),
    "text address": lambda: edited(lambda v: put(v, "ab", "rows", 0, "address")),
    "int address": lambda: edited(lambda v: put(v, 7, "rows", 0, "address")),
    "long address": lambda: edited(lambda v: put(v, ["a", 1, 2], "rows", 0, "address")),
    "float pass": lambda: edited(lambda v: put(v, ["a", 1.0], "rows", 0, "address")),
    "shape": lambda: edited(lambda v: put(v, [2, -1], "rows", 0, "shape")),
    "count": lambda: edited(lambda v: put(v, 1.5, "rows", 0, "frozen_reached")),
    "huge count": lambda: edited(lambda v: put(v, 2**70, "rows", 0, "frozen_reached")),
    "flag": lambda: edited(lambda v: put(v, 1, "rows", 0, "detached")),
    "duplicate": lambda: edited(lambda v: put(v, v["rows"][0], "rows", 1)),
    "our columns": lambda: edited(lambda v: put(v, [1], "circuitlab", "columns", "n")),
    "our run": lambda: edited(lambda v: put(v, {}, "circuitlab", "run")),
    "run of another kind": lambda: edited(
        lambda v: put(v, "edge", "circuitlab", "run", "kind")
    ),
    "ours no object": lambda: edited(lambda v: put(v, [], "circuitlab")),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_not_exactly_right_is_refused(name: str):
    error = refusal(ReadTable.from_json, BROKEN[name]())
    assert isinstance(error, DataError)
    assert error.code == "read_table_artifact_invalid"


def test_files(tmp_path: Path):
    found = table([1.0, NAN])
    path = found.save(tmp_path / "reads.json")
    assert ReadTable.load(path).run_id == found.run_id
    assert [p.name for p in tmp_path.iterdir()] == ["reads.json"]
    error = refusal(ReadTable.load, tmp_path / "missing.json")
    assert error.code == "read_table_artifact_invalid"
    dense = table([None], values={0: np.ones(6)}, status=["ok"])
    assert refusal(dense.to_json).code == "read_table_not_portable"
    assert (
        refusal(dense.save, tmp_path / "dense.json").code == "read_table_not_portable"
    )


def test_edge_tables_are_read_tables_of_kind_edge(tmp_path: Path):
    found = ReadTable.from_edges(edges())
    row = found["m0->a1.h0<q>"]
    assert ("t0", "EDGE", ("m0->a1.h0<q>",)) in found
    assert (row.method, row.grain, row.resolution) == ("eap", "site", "exact")
    assert row.reduction == "sum_positions_mean_examples"
    assert row.site_key == "e1|m0|a1.h0|q"
    assert (row.n, row.value) == (5, None)
    again = ReadTable.load(found.save(tmp_path / "edges.json"))
    assert again.to_edges().rows.equals(edges().rows)
    assert again.to_edges().run_id == edges().run_id
    assert refusal(table([1.0]).to_edges).code == "read_table_kind"


def test_the_table_half_needs_no_torch():
    code = (
        "import sys, circuitlab.read_table, circuitlab.site_selection\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the store ---


def test_the_store_keeps_keys_and_digests(tmp_path: Path):
    found = table([1.0, NAN, None, -INF])
    with Store(tmp_path / "store.duckdb") as store:
        run_id = store.save(found)
        assert run_id == found.run_id
        again = store.load(run_id)
        assert isinstance(again, ReadTable)
        assert np.array_equal(again.scores, found.scores, equal_nan=True)
        assert again.run_id == run_id
        assert not again.rescorable
        assert again.column("site_key") == found.column("site_key")
        assert again.column("n") == found.column("n")
        assert set(again.column("policy_digest")) == {"d" * 64}
        assert store.save(again) == run_id
        dense = table([None], values={0: np.ones(6)}, status=["ok"])
        assert refusal(store.save, dense).code == "read_table_not_portable"
        kept = store.load(store.save(ReadTable.from_edges(edges())))
        assert isinstance(kept, EdgeTable)


# --- the by= door ---


def names(found: SiteSelection) -> list[str]:
    return list(found)


def test_sites_rank_signed_unless_told_otherwise():
    found = table([1.0, -5.0, 3.0, None, NAN, INF])
    best = top_k(found, 2)
    assert isinstance(best, SiteSelection)
    # In the order of the forward pass, not of the scores.
    assert names(best) == [SITES[2], SITES[5]]
    assert names(top_k(k=2, by=found, rank="magnitude")) == [SITES[1], SITES[5]]
    assert names(threshold(found, above=1.0)) == [SITES[2], SITES[5]]
    assert names(threshold(found, above=-9.0, below=2.0)) == [SITES[0], SITES[1]]
    assert names(top_fraction(found, 0.5)) == [SITES[2], SITES[5]]
    assert names(top_k(found, 0)) == []
    facts = best.provenance
    assert (facts["rankable"], facts["selected"]) == (4, 2)
    assert facts["excluded"] == {
        "not_upstream_of_target": 2,
        "unreachable": 1,
        "nan": 1,
    }
    assert facts["rank"] == "signed"
    assert facts["text"].startswith("top_k(k=2)")
    assert best.keys == tuple(f"s1|{s}|out|1" for s in names(best))
    error = refusal(top_k, found, 5)
    assert (error.code, error.fields["expected"]) == ("k_out_of_range", [0, 4])
    assert refusal(top_k, found, 2, rank="support").code == "rank_invalid"


@given(st.lists(st.sampled_from([-2.0, 0.0, 1.0, NAN]), min_size=1, max_size=6))
@settings(max_examples=60, deadline=None)
def test_ties_break_in_the_order_of_the_pass_and_top_k_is_nested(scores):
    found = table(scores)
    rankable = [i for i, s in enumerate(scores) if not math.isnan(s)]
    order = sorted(rankable, key=lambda i: (-scores[i], i))
    before: set[str] = set()
    for k in range(len(rankable) + 1):
        chosen = top_k(found, k).sites
        assert chosen == {SITES[i] for i in order[:k]}
        assert before <= chosen
        before = set(chosen)


def test_pins_and_filters():
    found = table([1.0, -5.0, 3.0, 2.0])
    assert names(top_k(found, 1, pins=[SITES[1]])) == [SITES[1], SITES[2]]
    assert names(top_k(found, 1, where="blocks.*.mlp.*")) == [SITES[3]]
    assert refusal(top_k, found, 1, pins=["nowhere"]).code == "site_unknown"


def test_elements_rank_over_matching_index_spaces():
    values = {
        0: np.array([[5.0, NAN, 1.0], [0.0, 0.0, 0.0]]),
        1: np.array([[-INF, 5.0, 2.0], [9.0, 0.0, 0.0]]),
    }
    found = table([None, None], values=values, status=["ok", "ok"])
    best = top_k(found, 3)
    assert len(best) == 3
    assert best.grain == "element"
    assert best.elements[SITES[0], 1].tolist() == [0]
    assert best.elements[SITES[1], 1].tolist() == [1, 3]
    mask = best.mask((SITES[1], 1), (2, 3))
    assert mask is not None
    assert mask.tolist() == [[False, True, False], [True, False, False]]
    # NaN does not rank, not even below minus infinity.
    assert len(top_k(found, 11)) == 11
    assert refusal(top_k, found, 12).code == "k_out_of_range"
    error = refusal(best.mask, (SITES[1], 1), (3, 2))
    assert error.fields["reason"] == "by_table_index_space_mismatch"


def test_elements_outside_a_mask_do_not_rank():
    inside = np.array([[True, False, False], [False, True, False]])
    whole = table([None], values={0: -np.ones((2, 3))}, status=["ok"])
    found = dataclasses.replace(whole, masks_by_row={0: inside})
    assert top_k(found, 2).elements[SITES[0], 1].tolist() == [0, 4]
    assert refusal(top_k, found, 3).code == "k_out_of_range"


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (table([1.0, 2.0], targets=2), "by_table_multi_target"),
        (table([]), "by_table_empty"),
        (table([1.0], samples=["0"]), "grain"),
    ],
)
def test_tables_that_cannot_rank_say_why(found: ReadTable, reason: str):
    error = refusal(top_k, found, 1)
    assert isinstance(error, ArgumentError)
    assert (error.code, error.fields["reason"]) == ("by_score_invalid", reason)


def test_a_folded_or_narrowed_table_ranks():
    found = table([1.0, 2.0, 4.0, -4.0], targets=2)
    assert names(top_k(found.target("t1"), 1)) == [SITES[0]]
    assert names(top_k(found.aggregate_targets(max), 1)) == [SITES[0]]


def test_loaded_tables_rank_as_fresh_ones(tmp_path: Path):
    found = table([1.0, -5.0, NAN, 2.0])
    loaded = ReadTable.load(found.save(tmp_path / "reads.json"))
    assert names(top_k(loaded, 2)) == names(top_k(found, 2))


def test_edge_tables_give_circuits_in_every_form(tmp_path: Path):
    fresh = edges()
    expected = top_k(fresh, 5)
    assert isinstance(expected, Circuit)
    for found in (
        ReadTable.from_edges(fresh),
        ReadTable.load(ReadTable.from_edges(fresh).save(tmp_path / "edges.json")),
    ):
        assert top_k(found, 5) == expected
        assert top_k(k=5, by=found, rank="support") == top_k(fresh, 5, rank="support")
        assert threshold(found, above=0.5) == threshold(fresh, above=0.5)


def selections() -> Iterator[SiteSelection]:
    yield top_k(table([1.0, 2.0]), 1)


def test_a_selection_of_another_model_is_foreign():
    for selection in selections():
        error = refusal(selection.check, "other", "")
        assert error.fields["reason"] == "by_table_foreign"
        error = refusal(selection.check, "w" * 64, "other")
        assert error.fields["reason"] == "by_table_foreign"
