"""Validate: does the circuit on the screen do the work? Measured in a worker."""

from __future__ import annotations

from dataclasses import replace

import data
import jobs
import streamlit as st
import ui
import validation
from view import View

path, stamp, runs = ui.page("Validate")
if len(runs) and st.query_params.get("run", "") in set(
    runs[runs["kind"] == "eval"]["run_id"]
):
    # An evaluation's page is that of the scores it is about.
    ui.go_to_scores(data.curves(path, stamp))
run = ui.pick_run(runs, ("edge", "circuit"))
view = replace(View.of(st.query_params), run=run["run_id"])
with ui.guarded():
    ranked = data.ranked_for(path, run["kind"], view)
    chosen = data.selection(path, run["kind"], view)

with st.container(horizontal=True, vertical_alignment="center"):
    st.markdown(f"**{len(chosen.kept):,} edges** of {ui.plain(run['model'])}, as on")
    ui.link("circuit", "the Circuit page", view)

with st.form("validate"):
    options = validation.options(path, "v")
    left, right = st.columns(2)
    one = left.form_submit_button(
        "Validate this circuit",
        type="primary",
        icon=":material/verified:",
        width="stretch",
    )
    many = right.form_submit_button(
        "Curve over sizes",
        icon=":material/show_chart:",
        width="stretch",
        disabled=run["kind"] != "edge",
    )
if one:
    with ui.guarded():
        circuit = validation.saved_circuit(path, run["kind"], view)
    jobs.begin(
        path, f"validate {len(chosen.kept):,} edges", ["validate", circuit, *options]
    )
if many:
    rank = ["--rank", view.rank]
    jobs.begin(path, "curve over sizes", ["curve", run["run_id"], *rank, *options])

jobs.show(path, lambda job: st.caption("Saved: it is in the picture below."))

rows = data.curves(path, stamp)
scores = run["run_id"] if run["kind"] == "edge" else run["parent"] or run["run_id"]
if len(rows):
    rows = rows[rows["scores"].isin([scores, run["run_id"]])]
if rows.empty:
    st.info("Nothing was evaluated for this run yet.", icon=":material/science:")
    st.stop()

here = chosen.circuit(ranked, view).id
left, right = st.columns([2.2, 1])
with left:
    clicked = validation.curve(rows, here)
with right:
    validation.completeness(rows, here)
    if clicked is not None:
        st.markdown(f"**{int(clicked['n_edges']):,} edges**")
        k = None if clicked["k"] != clicked["k"] else int(clicked["k"])
        ui.link("circuit", "Open this circuit", replace(view, k=k))
validation.table(rows)

mine = rows[rows["circuit_id"] == here]
row = clicked if clicked is not None else (mine if len(mine) else rows).iloc[-1]
st.markdown(f"##### Prompts, with {int(row['n_edges']):,} edges kept")
validation.examples(path, stamp, row)
