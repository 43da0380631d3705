"""The pages, in the order of the menu."""

from __future__ import annotations

import streamlit as st
from streamlit.navigation.page import Page

PAGES = (
    ("runs", "Runs", ":material/list:"),
    ("circuit", "Circuit", ":material/hub:"),
    ("validate", "Validate", ":material/verified:"),
    ("reads", "Reads", ":material/grid_on:"),
    ("compare", "Compare", ":material/compare_arrows:"),
    ("sweeps", "Sweeps", ":material/scatter_plot:"),
    ("sql", "SQL", ":material/database:"),
    ("new_run", "New run", ":material/add_circle:"),
)


def navigation() -> Page:
    """Declare the pages; returns the one that the URL names.

    They have no icons here: the browser would fetch them from outside as favicons.
    """
    st.session_state["declared"] = True
    pages = [
        st.Page(f"pages/{name}.py", title=title, default=name == "runs")
        for name, title, _ in PAGES
    ]
    return st.navigation(pages, position="top")


def declare_once() -> None:
    """Begin again with the pages declared, where a page was run without main.py.

    Streamlit takes a folder `pages/` for its own until a script declares pages, and
    the first visit to a new server may be a link to a page.
    """
    if not st.session_state.get("declared"):
        navigation()
        st.rerun()
