"""Runs: find, open, compare, tag, note, delete and restore."""

from __future__ import annotations

import datetime

import data
import frames
import streamlit as st
import ui

PERIODS = {"any time": None, "today": 1, "7 days": 7, "30 days": 30, "a year": 365}
SORTS = ["newest", "oldest", "model", "task", "method", "prompts", "faithfulness"]

path, stamp, runs = ui.page("Runs")
frames.deleted_banner(path, stamp)
if runs.empty:
    ui.nothing_yet(path)
    st.stop()


def choices(column: str) -> list[str]:
    return sorted(runs[column].dropna().unique())


with st.container(horizontal=True, vertical_alignment="bottom"):
    text = st.text_input(
        "Search", key="text", bind="query-params", placeholder="any text, id or note"
    )
    kinds = st.multiselect("Kind", choices("kind"), key="kind", bind="query-params")
    models = st.multiselect("Model", choices("model"), key="model", bind="query-params")
    tasks = st.multiselect("Task", choices("task"), key="task", bind="query-params")
    methods = st.multiselect(
        "Method", choices("method"), key="method", bind="query-params"
    )
    tags = sorted({tag for found in runs["tags"] for tag in found})
    tagged = st.multiselect("Tag", tags, key="tag", bind="query-params")
    period = st.selectbox("Saved", list(PERIODS), key="saved", bind="query-params")
    sort = st.selectbox("Sort by", SORTS, key="sort", bind="query-params")

table = frames.run_table(runs, data.curves(path, stamp))
equal = {"kind": kinds, "model": models, "task": tasks, "method": methods}
table = frames.filtered(
    table, equal, tagged, text, PERIODS[period], datetime.datetime.now(datetime.UTC)
)
table = frames.sorted_by(table, sort).reset_index(drop=True)

chosen = [i for i in st.query_params.get("chosen", "").split(",") if i]
chosen = [i for i in table["run_id"] if i in chosen]


def choose() -> None:
    """Put the ticked rows into the URL."""
    rows = st.session_state["table"]["selection"]["rows"]
    st.query_params["chosen"] = ",".join(table["run_id"].iloc[rows])


st.caption(
    f"{len(table):,} of {len(runs):,} runs. Tick one to open it, two to compare."
)
if chosen:
    frames.actions(path, table.set_index("run_id", drop=False).loc[chosen])
st.dataframe(
    table[frames.RUN_COLUMNS],
    key="table",
    on_select=choose,
    selection_default={"selection": {"rows": frames.rows_of(table, chosen)}},
    hide_index=True,
    placeholder="",
    height=min(36 * len(table) + 40, 620),
    column_config=frames.run_columns(),
)
