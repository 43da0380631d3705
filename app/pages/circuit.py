"""Circuit: a run's strongest edges as a picture, cut, pruned, pinned and exported."""

from __future__ import annotations

from dataclasses import replace

import data
import panels
import streamlit as st
import ui
from circuit_view import circuit_view
from view import View, picture

KEY = "circuit"

path, stamp, runs = ui.page("Circuit")
run = ui.pick_run(runs, ("edge", "circuit"))


def moved() -> None:
    """Put what the picture reports into the URL."""
    said = st.session_state[KEY].get("view") or ""
    found = View.of(st.query_params).changed(said)
    ui.remember(found)


with st.container(horizontal=True, vertical_alignment="bottom"):
    rank = st.segmented_control(
        "Ranked by",
        ["magnitude", "support"],
        default="magnitude",
        key="rank",
        bind="query-params",
        required=True,
        help="Magnitude is |score|. Support is −score: what helps the behaviour most.",
    )
    where = st.text_input(
        "Edges to choose from",
        key="where",
        bind="query-params",
        placeholder="all; or for example  a5-9.*<q> & |score|>0.01",
    )
    prune = st.toggle(
        "Prune",
        value=True,
        key="prune",
        bind="query-params",
        help="Drop edges that lie on no path from the input to the logits.",
    )
    actions = st.container(
        horizontal=True, width="content", vertical_alignment="center"
    )

view = replace(
    View.of(st.query_params),
    run=run["run_id"],
    rank="support" if rank == "support" else "magnitude",
    where=where.strip(),
    prune=bool(prune),
)
with ui.guarded():
    ranked = data.ranked_for(path, run["kind"], view)
    chosen = data.selection(path, run["kind"], view)

with actions:
    ui.link("validate", "Validate", view)
    with st.popover("Export", icon=":material/download:"):
        panels.exports(path, ranked, view, chosen)
left, right = st.columns([3.4, 1])
with left:
    state = view.state(ranked.size(view))
    state["seq"] = ui.sequence(KEY)
    circuit_view(
        {"id": view.run, **picture(ranked, view, chosen)},
        state,
        key=KEY,
        on_change=moved,
    )
with right:
    panels.details(path, stamp, ranked, view, chosen)
