"""Reads: ACT tables and the sums of edge scores, as heat maps."""

from __future__ import annotations

import charts
import data
import reading
import streamlit as st
import ui
from view import View

path, stamp, runs = ui.page("Reads")
run = ui.pick_run(runs, ("act", "edge"))

if run["kind"] == "edge":
    with ui.guarded():
        ranked = data.ranked_for(path, "edge", View(run=run["run_id"]))
    rows, order = reading.sender_grid(ranked)
    st.caption(
        "The support of every component: the sum over the edges that leave it. Positive "
        "(blue) helps the behaviour, negative (red) hurts it."
    )
    layers = reading.layers_of(rows["layer"].tolist())
    st.altair_chart(charts.heat_chart(rows, order, layers, ("component", "support")))
    st.dataframe(rows.sort_values("score", key=abs, ascending=False), hide_index=True)
    st.stop()

with ui.guarded():
    rows = reading.with_places(data.act_rows(path, stamp, run["run_id"]))
    prompts = data.prompts(path, stamp, run["dataset_digest"])
with st.container(horizontal=True, vertical_alignment="bottom"):
    targets = sorted(rows["target_id"].dropna().unique())
    target = st.selectbox("Target", targets, key="target", bind="query-params")
    axis = st.segmented_control(
        "Across",
        reading.axes(rows),
        default="site",
        key="axis",
        bind="query-params",
        required=True,
    )
    whats = list(dict.fromkeys(rows["what"]))
    what = None
    if axis != "site":
        what = st.selectbox("Site in its block", whats, key="what", bind="query-params")
    examples = sorted(rows["example"].dropna().unique(), key=lambda e: (len(e), e))
    example = "all"
    if examples and axis != "example":
        names = ["all", *examples]
        example = st.selectbox("Prompt", names, key="example", bind="query-params")

shown = rows[rows["target_id"] == target]
shown = shown if what is None else shown[shown["what"] == what]
shown = shown if example == "all" else shown[shown["example"] == example]
listed = None if prompts is None else prompts.to_pylist()
number = int(example) if example and example.isdecimal() else 0
tokens = reading.tokens_of(listed, number)
cells, order = reading.grid(shown, axis or "site", tokens)
if cells.empty:
    st.info("These rows have no numbers to draw.")
else:
    layers = reading.layers_of(cells["layer"].tolist())
    st.altair_chart(charts.heat_chart(cells, order, layers, (axis or "site", "score")))
    if tokens and axis == "position":
        sums = cells.groupby("x")["score"].sum().reindex(order)
        most = float(sums.abs().max() or 1.0)
        st.html(charts.tokens_html(tokens, [], [s / most for s in sums]))
method, reduction = shown["method"].iloc[0], shown["reduction"].iloc[0]
st.caption(ui.plain(f"{method}, reduced by {reduction}; {len(shown):,} rows"))
st.dataframe(
    shown[["site", "position", "example", "score", "status"]].dropna(axis=1, how="all"),
    hide_index=True,
    height=280,
)
