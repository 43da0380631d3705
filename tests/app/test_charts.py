"""What charts and tables are made of: fronts, grids, tokens, filters. No page here."""

from __future__ import annotations

import datetime
import json

import numpy as np
import pandas as pd
import pytest
from charts import curve_chart, front_of, tokens_html
from frames import filtered, run_table
from reading import axes, grid, layers_of, with_places
from stores import NASTY, curve_of, edge_table
from sweeping import plans, tagged
from ui import plain
from validation import with_series

from circuitlab.tables import ACT


def test_the_front_is_what_no_smaller_circuit_equals():
    rows = pd.DataFrame(
        {
            "n_edges": [10, 10, 20, 30, 40, 50],
            "faithfulness": [0.5, 0.4, 0.5, 0.9, 1.3, 0.95],
        }
    )
    assert front_of(rows).tolist() == [True, False, False, True, False, True]


def test_random_circuits_of_one_size_are_one_point():
    rows = curve_of(edge_table(), [10, 40]).rows.to_pandas()
    draws = rows[rows["label"] == "random"]
    more = draws.assign(faithfulness=draws["faithfulness"] + 0.2)
    both = pd.concat([rows, more], ignore_index=True)
    shown = with_series(both.assign(scores="r"))
    random = shown[shown["kind"] == "random"]
    assert len(random) == draws["n_edges"].nunique()
    assert sorted(random["faithfulness"]) == pytest.approx(
        sorted(draws["faithfulness"] + 0.1)
    )
    assert all(
        low < mean
        for low, mean in zip(
            random["faithfulness_low"], random["faithfulness"], strict=True
        )
    )
    chart = curve_chart(shown, "").to_dict()
    assert "point" in json.dumps(chart["params"])


def act_rows(**columns) -> pd.DataFrame:
    count = len(next(iter(columns.values())))
    empty = {name: [None] * count for name in ACT.names}
    return pd.DataFrame({**empty, **columns})


def test_reads_are_spread_by_layer_and_position():
    sites = [f"blocks.{layer}.attn.hook_z" for layer in (0, 1) for _ in range(3)]
    rows = with_places(
        act_rows(site=sites, position=[0, 1, 2] * 2, score=np.arange(6.0))
    )
    assert axes(rows) == ["site", "position"]
    cells, order = grid(rows, "position", ["When", " Mary"])
    assert order == ["0  When", "1  Mary", "2"]
    first = cells[(cells["layer"] == "1") & (cells["x"] == "0  When")]
    assert first["score"].tolist() == [3.0]
    assert layers_of(cells["layer"].tolist()) == ["1", "0"]


def test_reads_are_spread_by_site_head_and_example():
    rows = with_places(
        act_rows(
            site=["embed.hook_out", "blocks.0.attn.hook_z", "blocks.0.attn.hook_z"],
            element=[None, "h0", "h1"],
            sample_id=["0", "0", "1"],
            score=[1.0, 2.0, 3.0],
        )
    )
    assert axes(rows) == ["site", "head", "example"]
    cells, order = grid(rows, "site")
    assert order == ["embed.hook_out", "attn.hook_z"]
    assert cells["score"].tolist() == [1.0, 5.0]
    assert layers_of(cells["layer"].tolist()) == ["0", "outside"]
    heads, order = grid(rows, "head")
    assert order == ["h0", "h1"]
    assert heads["score"].tolist() == [2.0, 3.0]


def test_tokens_are_escaped_and_marked():
    text = tokens_html(["<b>", " x"], ["<i>", " x"], [-0.5, None])
    assert "<b>" not in text
    assert "<i>" not in text
    assert "&lt;i&gt;" in text
    assert text.count("border-bottom") == 1
    assert "rgba(217" in text


def test_plain_text_is_no_markdown():
    said = plain(NASTY + "\n# head $x$ :red[y]")
    for sign in "<![*#$:":
        assert f"\\{sign}" in said
    assert "\n" not in said


def test_filters_are_of_the_text_not_a_pattern():
    runs = pd.DataFrame(
        {
            name: ["a.b", "acb"]
            for name in ("run_id", "model", "task", "method", "metric")
        }
        | {"note": ["", None], "kind": ["edge"] * 2, "tags": [["x"], []]}
        | {"saved_at": pd.to_datetime(["2026-11-01", "2026-11-20"])}
    )
    table = run_table(runs, pd.DataFrame())
    now = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    assert len(filtered(table, {}, [], "a.b", None, now)) == 1
    assert len(filtered(table, {}, ["x"], "", None, now)) == 1
    assert filtered(table, {}, [], "", 7, now)["run_id"].tolist() == ["acb"]


def test_sweeps_are_told_with_what_failed(tmp_path):
    log = tmp_path / "sweeps" / "first" / "steps.jsonl"
    log.parent.mkdir(parents=True)
    steps = [
        {"schema": "circuitlab_sweep_v1", "name": "first", "sweep": "d"},
        {"cell": "a", "ok": True, "rows": [{}, {}], "runs": ["r1"]},
        {"cell": "b", "ok": False, "error": "x"},
        {"cell": "c", "ok": False, "error": "x"},
        {"cell": "c", "ok": True, "rows": [{}], "runs": ["r2"]},
    ]
    lines = "".join(json.dumps(step) + "\n" for step in steps)
    log.write_text(lines + '{"cell": "being writ')
    found = plans(str(tmp_path / "circuitlab.duckdb"))
    row = found.iloc[0]
    assert (row["sweep"], row["cells done"], row["cells failed"]) == ("first", 2, 1)
    assert row["circuits"] == 3
    runs = pd.DataFrame({"run_id": ["r1", "r2"], "tags": [["sweep:first"], []]})
    rows = pd.DataFrame({"eval_run": ["r1", "r2"]})
    assert tagged(rows, runs, "first")["eval_run"].tolist() == ["r1"]
