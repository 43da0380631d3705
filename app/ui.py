"""What all pages share: their heads, guards and escaping."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import data
import pandas as pd
import streamlit as st
from navigation import declare_once
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
