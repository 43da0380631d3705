"""Every page on a store with one of everything, without a browser."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import APP
from stores import NASTY, SMALL, busy_heads, edge_table, fill_many

from circuitlab.circuits import overlap, top_k
from circuitlab.store import Store

PAGES = ["runs", "circuit", "validate", "reads", "compare", "sweeps", "sql", "new_run"]
BROWSE = [page for page in PAGES if page != "new_run"]


def texts(app) -> str:
    """All that a page says in Markdown, where HTML and images could slip in."""
    kinds = (app.markdown, app.caption, app.subheader, app.error, app.warning, app.info)
    return "\n".join(str(element.value) for kind in kinds for element in kind)


@pytest.mark.parametrize("page", PAGES)
def test_pages_open(open_page, page):
    app = open_page(page)
    assert not app.exception
    assert not app.error
    assert len(app.subheader) == 1


@pytest.mark.parametrize("page", PAGES)
def test_pages_greet_an_empty_store(open_page, tmp_path, page):
    app = open_page(page, store=tmp_path / "none.duckdb")
    assert not app.exception
    assert not app.error
    assert not (tmp_path / "none.duckdb").exists()
    if page in ("runs", "circuit", "validate"):
        assert "There is no run" in app.info[0].value


@pytest.mark.parametrize("page", ["circuit", "validate", "reads", "compare", "runs"])
def test_names_are_shown_as_they_are(open_page, ids, page):
    nasty = {"run": ids["nasty"], "runs": f"{ids['nasty']},{ids['first']}"}
    app = open_page(page, **nasty, chosen=ids["nasty"])
    assert not app.exception
    said = texts(app)
    assert not re.search(r"(?<!\\)<img", said)
    assert not re.search(r"(?<!\\)!(?<!\\)\[x\]", said)


@pytest.mark.parametrize("page", BROWSE)
def test_a_store_deleted_while_open(open_page, own_store, page):
    path, found = own_store
    app = open_page(page, store=path, run=found["first"])
    assert not app.exception
    for file in path.parent.glob("circuitlab.duckdb*"):
        if file.is_dir():
            for part in sorted(file.rglob("*"), reverse=True):
                part.rmdir() if part.is_dir() else part.unlink()
            file.rmdir()
        else:
            file.unlink()
    app.run()
    assert not app.exception
    assert app.info or app.warning


def test_pages_are_short():
    for page in (APP / "pages").glob("*.py"):
        assert len(page.read_text(encoding="utf-8").splitlines()) < 120, page.name


def test_browsing_loads_no_torch(filled):
    """In a process of its own: this one may have loaded torch for other tests."""
    program = f"""
import os, sys
sys.path.insert(0, {str(APP)!r})
os.environ["CIRCUITLAB_STORE"] = {str(filled[0])!r}
from streamlit.testing.v1 import AppTest
app = AppTest.from_file({str(APP / "main.py")!r}, default_timeout=60)
app.query_params["run"] = {filled[1]["first"]!r}
for page in {PAGES!r}:
    app.switch_page("pages/" + page + ".py")
    app.run()
    assert not app.exception, page
heavy = sorted({{"torch", "transformer_lens", "transformers"}} & set(sys.modules))
assert not heavy, heavy
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# --- runs ---


def shown_runs(app) -> list[str]:
    return app.dataframe[0].value["run"].tolist()


def test_runs_are_filtered_by_the_url(open_page, ids):
    app = open_page("runs", text="greater grouped")
    assert shown_runs(app) == [ids["grouped"][:8]]
    app = open_page("runs", kind="circuit")
    assert shown_runs(app) == [ids["circuit"][:8]]
    app = open_page("runs", tag="paper")
    assert shown_runs(app) == [ids["first"][:8]]
    app = open_page("runs", text="onerror")
    assert shown_runs(app) == [ids["nasty"][:8]]


def test_runs_are_sorted(open_page, ids):
    oldest = shown_runs(open_page("runs", sort="oldest"))
    assert oldest[0] == ids["first"][:8]
    best = open_page("runs", sort="faithfulness").dataframe[0].value["faithfulness"]
    assert best.dropna().is_monotonic_decreasing


def test_a_run_is_deleted_and_brought_back(open_page, own_store):
    path, found = own_store
    app = open_page("runs", store=path, chosen=found["second"])
    app.button(key="delete").click().run()
    assert found["second"][:8] not in shown_runs(app)
    assert found["second"] not in Store(path).runs()["run_id"].to_pylist()
    app.button(key="undo").click().run()
    assert found["second"][:8] in shown_runs(app)


def test_a_run_is_tagged(open_page, own_store):
    path, found = own_store
    app = open_page("runs", store=path, chosen=found["grouped"])
    app.text_input(key="new-tags").set_value("one, two")
    next(b for b in app.button if b.label == "Add").click().run()
    assert not app.exception
    tagged = Store(path).runs(tag="two")["run_id"].to_pylist()
    assert tagged == [found["grouped"]]


def test_a_thousand_runs(open_page, tmp_path):
    path = tmp_path / "many.duckdb"
    fill_many(path, 1000)
    app = open_page("runs", store=path)
    assert not app.exception
    assert len(shown_runs(app)) == 1000
    app = open_page("runs", store=path, model="model-3", task="capitals")
    assert set(app.dataframe[0].value["model"]) == {"model-3"}


# --- circuit ---


def metric(app, label: str) -> str:
    return next(m.value for m in app.metric if m.label == label)


def test_the_circuit_is_the_librarys(open_page, ids):
    app = open_page("circuit", run=ids["first"], k="40", rank="support")
    edges = edge_table()
    expected = top_k(edges, 40, rank="support")
    assert metric(app, "Edges") == str(len(expected))


def test_a_selector_narrows_the_edges(open_page, ids):
    app = open_page(
        "circuit", run=ids["first"], where="m*->logits", prune="false", k="2"
    )
    listed = app.dataframe[0].value["edge"].tolist()
    assert len(listed) == 2
    assert all(re.fullmatch(r"m\d->logits", name) for name in listed)


def test_a_wrong_selector_is_explained(open_page, ids):
    app = open_page("circuit", run=ids["first"], where="<<nonsense")
    assert not app.exception
    assert len(app.error) == 1
    assert "Code" in app.caption[-1].value


def test_an_edge_is_told_of(open_page, ids):
    edge = max(edge_table(), key=lambda row: abs(row.score or 0))
    app = open_page("circuit", run=ids["first"], sel=edge.edge)
    assert float(metric(app, "Score")) == pytest.approx(edge.score, rel=0.01)
    assert metric(app, "Rank") == "1"
    others = app.dataframe[0].value
    assert {ids["first"][:8], ids["second"][:8]} <= set(others["run"])


def test_a_component_is_told_of(open_page, ids):
    head = busy_heads(edge_table(), 100)[0]
    app = open_page("circuit", run=ids["first"], sel=head, k="100")
    kept = top_k(edge_table(), 100)
    out = [name for name in kept.ordered if name.startswith(f"{head}->")]
    assert sorted(app.dataframe[-1].value["edge"]) == sorted(out)


def test_hidden_components_are_gone(open_page, ids):
    one, two, *_ = busy_heads(edge_table(), 100)
    app = open_page("circuit", run=ids["first"], k="100", hide=f"{one},{two}")
    listed = app.dataframe[0].value["edge"]
    assert len(listed)
    assert not listed.str.contains(f"{one}|{two}", regex=True).any()


@pytest.mark.parametrize("which", ["circuit", "grouped"])
def test_stored_circuits_and_grouped_heads_are_drawn(open_page, ids, which):
    app = open_page("circuit", run=ids[which])
    assert not app.exception
    assert int(metric(app, "Edges")) > 0


def test_a_link_to_a_run_that_is_gone(open_page):
    app = open_page("circuit", run="feedfacefeedface", k="not a number", sel="<b>")
    assert not app.exception
    assert "not in this store" in app.warning[0].value


# --- the other pages ---


def test_evaluations_are_listed(open_page, ids):
    app = open_page("validate", run=ids["first"], k="80")
    table = app.dataframe[0].value
    assert set(table["label"]) == {"circuit", "random"}
    assert table["faithfulness"].notna().all()


def test_an_evaluation_leads_to_its_scores(open_page, ids):
    app = open_page("validate", run=ids["curve"])
    assert not app.exception
    assert app.query_params["run"] == ids["first"]


def test_overlaps_are_the_librarys(open_page, ids):
    app = open_page("compare", runs=f"{ids['first']},{ids['second']}", ck="60")
    row = app.dataframe[0].value.iloc[0]
    one, two = top_k(edge_table(), 60), top_k(edge_table(seed=1), 60)
    expected = overlap(one, two)
    assert row["IoU"] == pytest.approx(expected.iou)
    assert row["in both"] == expected.n_both
    a, b = (np.abs(edge_table(seed=s).scores) for s in (0, 1))
    assert np.corrcoef(a, b)[0, 1] > 0
    assert 0 < row["rank correlation"] <= 1


def test_runs_of_other_shapes_have_no_common_picture(open_page, ids):
    app = open_page("compare", runs=f"{ids['first']},{ids['grouped']}")
    assert not app.exception
    assert "no common picture" in app.warning[0].value


def test_components_are_summed_over_their_edges(open_page, ids):
    app = open_page("reads", run=ids["first"])
    cells = app.dataframe[0].value.set_index(["layer", "x"])["score"]
    table = edge_table()
    sent = table.rows["sender"].to_numpy(zero_copy_only=False) == "a1.h2"
    assert cells["1", "h2"] == pytest.approx(table.support[sent].sum())
    assert len(cells) == SMALL.n_layers * (SMALL.n_heads + 1)


def test_named_queries_answer(open_page, ids):
    app = open_page("sql", query="top_edges", **{"p-run": ids["first"]})
    assert not app.exception
    best = app.dataframe[0].value["edge"].tolist()
    expected = top_k(edge_table(), 20, prune=False).edges
    assert set(best) == expected


def test_typed_queries_are_limited(open_page):
    app = open_page("sql", sql="select edge from v_edge", limit="7")
    assert len(app.dataframe[-1].value) == 7


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("drop table run", "sql_not_read_only"),
        ("select 1; select 2", "sql_not_read_only"),
        ("select * from read_csv('/etc/passwd')", "sql_failed"),
        ("select * from glob('/*')", "sql_failed"),
        ("select nonsense from v_run", "sql_failed"),
    ],
)
def test_queries_only_read_the_store(open_page, text, code):
    app = open_page("sql", sql=text)
    assert not app.exception
    assert code.replace("_", r"\_") in app.caption[-1].value


def test_slow_queries_are_stopped(open_page):
    text = "select sum(a.range * b.range) from range(10000000) a, range(10000000) b"
    app = open_page("sql", sql=text, seconds="1")
    assert not app.exception
    assert "stopped after 1 s" in app.error[0].value


@pytest.mark.parametrize("name", ["../../etc", "/etc/passwd", "--help", "a b", "~/x"])
def test_the_form_takes_no_path(open_page, own_store, name):
    app = open_page("new_run", store=own_store[0])
    app.text_input[0].set_value(name)
    next(b for b in app.button if b.label == "Start").click().run()
    assert not app.exception
    assert "no model name" in app.error[0].value
    assert not Path(f"{own_store[0]}.jobs").exists()


def test_an_html_name_is_in_the_fixtures():
    assert "<img" in NASTY
