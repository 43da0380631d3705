"""Sweeps: what was planned and done, and the front of size against faithfulness."""

from __future__ import annotations

from dataclasses import replace

import charts
import data
import streamlit as st
import sweeping
import ui
from view import View

path, stamp, runs = ui.page("Sweeps")
if runs.empty:
    ui.nothing_yet(path)
    st.stop()

plans = sweeping.plans(path)
rows = data.curves(path, stamp)
if len(plans):
    st.dataframe(plans, hide_index=True)
    names = ["every run", *plans["sweep"]]
    sweep = st.selectbox("Sweep", names, key="sweep", bind="query-params")
    if sweep and sweep != names[0]:
        rows = sweeping.tagged(rows, runs, sweep) if len(rows) else rows
else:
    st.caption("No sweep was run beside this store yet: circuitlab sweep sweep.toml")
rows = rows[rows["label"] == "circuit"] if len(rows) else rows
if rows.empty:
    st.info("No circuit was evaluated yet.", icon=":material/science:")
    st.stop()

with st.container(horizontal=True, vertical_alignment="bottom"):
    models = sorted(rows["model"].dropna().unique())
    model = st.selectbox("Model", models, key="s-model", bind="query-params")
    rows = rows[rows["model"] == model]
    tasks = sorted(rows["task"].dropna().unique())
    task = st.selectbox("Task", tasks, key="s-task", bind="query-params")
    rows = rows[rows["task"] == task]
    metrics = sorted(rows["metric_name"].dropna().unique())
    metric = st.selectbox("Metric", metrics, key="s-metric", bind="query-params")
    rows = rows[rows["metric_name"] == metric]
    ablations = sorted(rows["ablation"].dropna().unique())
    ablation = st.selectbox(
        "Ablation", ablations, key="s-ablation", bind="query-params"
    )
    rows = rows[rows["ablation"] == ablation]

shown = sweeping.points(rows, runs)
if shown.empty:
    st.info("These evaluations have no faithfulness to draw.")
    st.stop()
columns = [
    "series",
    "n_edges",
    "faithfulness",
    "ablation",
    "scores",
    "circuit_id",
    "front",
]
event = st.altair_chart(
    charts.pareto_chart(shown[columns]),
    on_select="rerun",
    selection_mode="point",
    key="pareto",
)
st.caption(
    "The grey line is the front: circuits that no smaller one equals. Faithfulness above "
    "1 overshoots, and counts as far from 1 as it is."
)
picked = (event or {}).get("selection", {}).get("point", [])
if picked and picked[0].get("scores"):
    match = shown[shown["circuit_id"] == picked[0]["circuit_id"]].iloc[0]
    k = int(match["k"]) if match["k"] == match["k"] else None
    view = replace(View(run=match["scores"]), k=k)
    ui.link("circuit", f"Open the circuit of {int(match['n_edges']):,} edges", view)
table = shown.sort_values(["front", "n_edges"], ascending=[False, True])
st.dataframe(
    table[["front", "series", "n_edges", "faithfulness", "kl", "ablation", "n"]],
    hide_index=True,
)
