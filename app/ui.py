"""What all pages share: their heads, guards and escaping."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import data
import pandas as pd
import streamlit as st
from charts import tokens_html
from navigation import PAGES, declare_once
from view import View

from circuitlab.errors import CircuitlabError

_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#+\-.!|<>$~:&])")


def plain(text: object) -> str:
    """A text that Markdown shows as it is: no HTML, no image, no formula."""
    flat = " ".join(str(text).split())
    return _MARKDOWN.sub(r"\\\1", flat)


def short(run_id: str) -> str:
    return run_id[:8]


def describe(row: pd.Series) -> str:
    """A run in a line, for menus."""
    what = row["method"] if row["kind"] == "edge" else row["kind"]
    facts = [row["model"], row["task"], what, f"n={row['n']}", short(row["run_id"])]
    return " · ".join(str(fact) for fact in facts if pd.notna(fact) and fact != "")


def page(title: str, about: str = "") -> tuple[str, str, pd.DataFrame]:
    """A page's head; returns the store's path and stamp, and all its runs.

    Where there is nothing to show yet it says how to begin, and stops the page.
    """
    declare_once()
    st.subheader(title, anchor=False)
    if about:
        st.caption(about)
    path = data.store_path()
    with guarded():
        data.fold(path)
        stamp = data.stamp(path)
        return path, stamp, data.runs(path, stamp)
    raise AssertionError  # guarded() has stopped the page


@contextmanager
def guarded() -> Iterator[None]:
    """Show a refusal as what it says, and stop the page there."""
    try:
        yield
    except CircuitlabError as error:
        st.error(plain(error), icon=":material/error:")
        st.caption(f"Code: {plain(error.code)}")
        st.stop()


def nothing_yet(path: str) -> None:
    """What an empty store says."""
    st.info("There is no run in this store yet.", icon=":material/inbox:")
    st.markdown("Score the edges of a model on a task, and the run appears here:")
    st.code(f"circuitlab score gpt2 --task ioi --n 32 --store {path}", language="bash")
    st.page_link("pages/new_run.py", label="Or start one from the app", icon="➕")


def pick_run(
    runs: pd.DataFrame,
    kinds: tuple[str, ...],
    param: str = "run",
    label: str = "Run",
) -> pd.Series:
    """Choose a run of these kinds; the choice lives in the URL. Stops where there is
    none, and where the URL names one that is not there."""
    wanted = st.query_params.get(param, "")
    found = runs[runs["kind"].isin(kinds)] if len(runs) else runs
    if found.empty:
        nothing_yet(data.store_path())
        st.stop()
    ids = found["run_id"].head(500).tolist()
    match = [i for i in found["run_id"] if wanted and i.startswith(wanted)]
    if wanted and not match:
        st.warning(
            f"Run {plain(wanted[:40])} is not in this store: it was deleted, or the "
            "link is for another store.",
            icon=":material/link_off:",
        )
    chosen = match[0] if match else ids[0]
    ids = ids if chosen in ids else [chosen, *ids]
    rows = found.set_index("run_id", drop=False)
    key = f"pick-{param}"
    st.session_state[key] = chosen

    def moved() -> None:
        st.query_params[param] = st.session_state[key]
        for name in ("sel", "hide", "pins", "groups", "through", "k"):
            st.query_params.pop(name, None)

    st.selectbox(
        label,
        ids,
        key=key,
        on_change=moved,
        format_func=lambda i: describe(rows.loc[i]),
        label_visibility="collapsed",
    )
    return rows.loc[chosen]


def run_choice(runs: pd.DataFrame, label: str, key: str) -> str:
    """Choose any run; the choice lives in the URL. Returns the run id."""
    ids: list[str] = runs["run_id"].head(500).tolist()
    rows = runs.set_index("run_id")
    rows["run_id"] = rows.index
    wanted = st.query_params.get(key, "")
    index = ids.index(wanted) if wanted in ids else 0

    def moved() -> None:
        st.query_params[key] = st.session_state[f"w-{key}"]

    return st.selectbox(
        plain(label),
        ids,
        index,
        key=f"w-{key}",
        on_change=moved,
        format_func=lambda i: describe(rows.loc[i]),
    )


def pick_runs(runs: pd.DataFrame, kinds: tuple[str, ...]) -> list[str]:
    """Choose several runs of these kinds; the choice lives in the URL (`runs`)."""
    found = runs[runs["kind"].isin(kinds)] if len(runs) else runs
    if found.empty:
        nothing_yet(data.store_path())
        st.stop()
    rows = found.set_index("run_id", drop=False)
    wanted = [i for i in st.query_params.get("runs", "").split(",") if i in rows.index]
    ids = list(dict.fromkeys([*wanted, *found["run_id"].head(500)]))
    st.session_state["pick-runs"] = wanted or ids[:2]

    def moved() -> None:
        st.query_params["runs"] = ",".join(st.session_state["pick-runs"])

    return st.multiselect(
        "Runs",
        ids,
        key="pick-runs",
        on_change=moved,
        max_selections=6,
        format_func=lambda i: describe(rows.loc[i]),
    )


UNBOUND = ("run", "k", "hide", "pins", "groups", "sel", "through")
"""The parts of a view that no widget binds to the URL."""


def remember(view: View) -> None:
    """Put a view into the URL."""
    found = view.params()
    for name in UNBOUND:
        if name in found and st.query_params.get(name) != found[name]:
            st.query_params[name] = found[name]
        elif name not in found and name in st.query_params:
            del st.query_params[name]


def sequence(key: str) -> int:
    """How many changes a picture has reported, so that it knows its own echo."""
    said = st.session_state.get(key, {}).get("view") or "{}"
    try:
        return int(json.loads(said).get("seq", 0))
    except (ValueError, TypeError, AttributeError):
        return 0


def link(page: str, label: str, view: View) -> None:
    """A link to another page, with the view in its address."""
    icons = {name: icon for name, _, icon in PAGES}
    st.page_link(
        f"pages/{page}.py", label=label, icon=icons[page], query_params=view.params()
    )


def go_to_scores(curves: pd.DataFrame) -> None:
    """Follow an evaluation in the URL to the run it evaluates."""
    own = curves[curves["eval_run"] == st.query_params["run"]]
    scores = own["scores"].dropna()
    if len(scores):
        st.query_params["run"] = scores.iloc[0]
        st.rerun()


def prompt_table(prompts: Sequence[Mapping[str, Any]], found: pd.DataFrame) -> None:
    """Prompts as tokens, one a row, with what the circuit keeps of each."""
    rows = []
    for row in found.to_dict("records"):
        if row["prompt"] >= len(prompts):
            continue
        prompt = prompts[row["prompt"]]
        clean = prompt["clean_token_texts"] or [prompt["clean"] or ""]
        other = prompt["corrupted_token_texts"] or []
        kept = None if pd.isna(row["kept"]) else float(row["kept"])
        tint = [
            kept if i < len(other) and other[i] != t else None
            for i, t in enumerate(clean)
        ]
        share = "–" if kept is None else f"{kept:.0%}"
        answers = ", ".join(prompt["answer_texts"] or [])
        rows.append(
            f"<tr><td class='n'>{row['prompt']}</td>"
            f"<td>{tokens_html(clean, other, tint)}</td>"
            f"<td>{html.escape(answers)}</td><td class='n'>{row['metric']:.3f}</td>"
            f"<td class='n'>{row['metric_full']:.3f}</td>"
            f"<td class='n'>{row['metric_ablated']:.3f}</td><td class='n'>{share}</td></tr>"
        )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("", "prompt", "answer", "circuit", "full", "ablated", "kept")
    )
    st.html(
        f"{TABLE_STYLE}<table class='cl'><tr>{head}</tr>{''.join(rows[:200])}</table>"
    )


TABLE_STYLE = """<style>
table.cl { border-collapse: collapse; width: 100%; font-size: 14px; }
table.cl th { text-align: left; font-weight: 500; opacity: 0.65; }
table.cl td, table.cl th { padding: 5px 10px; border-bottom: 1px solid rgba(128,128,128,0.22); }
table.cl td.n { text-align: right; font-variant-numeric: tabular-nums; }
table.cl small { opacity: 0.6; }
</style>"""
