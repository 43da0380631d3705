"""Compare: two or more runs or circuits, side by side and on one picture."""

from __future__ import annotations

import comparison
import data
import streamlit as st
import ui
from circuit_view import circuit_view
from view import View

path, stamp, runs = ui.page("Compare")
ids = ui.pick_runs(runs, ("edge", "circuit"))
if len(ids) < 2:
    st.info("Choose two runs or more.", icon=":material/compare_arrows:")
    st.stop()

with st.container(horizontal=True, vertical_alignment="bottom"):
    k = st.number_input(
        "Edges of each", 1, 1_000_000, 100, key="ck", bind="query-params", width=160
    )
    rank = st.segmented_control(
        "Ranked by",
        ["magnitude", "support"],
        default="magnitude",
        key="rank",
        bind="query-params",
        required=True,
    )
    prune = st.toggle("Prune", value=True, key="prune", bind="query-params")

kinds = dict(zip(runs["run_id"], runs["kind"], strict=True))
names = comparison.names(runs, ids)
views = [
    View(
        run=i,
        k=int(k),
        rank="support" if rank == "support" else "magnitude",
        prune=bool(prune),
    )
    for i in ids
]
with ui.guarded():
    ranked = [data.ranked_for(path, kinds[v.run], v) for v in views]
    chosen = [data.selection(path, kinds[v.run], v) for v in views]

st.dataframe(comparison.overlaps(names, ranked, chosen), hide_index=True)
a, b = st.columns(2)
first = a.selectbox("Blue, arrows", names, 0, key="first", bind="query-params")
second = b.selectbox("Red, bars", names, 1, key="second", bind="query-params")
one, two = names.index(first), names.index(second)
if one == two:
    st.stop()
if ranked[one].shape != ranked[two].shape:
    st.warning("These two are of models of different shape: no common picture.")
    st.stop()

union = comparison.union_picture(
    (ranked[one], ranked[two]), (chosen[one], chosen[two]), (first, second)
)
circuit_view(
    union,
    {**views[one].state(int(k)), "prune": False, "seq": 0},
    key="compare",
    on_change=lambda: None,
)
gained, lost, common = comparison.changes(
    (ranked[one], ranked[two]), (chosen[one], chosen[two])
)
left, right = st.columns([1.3, 1])
with left:
    st.altair_chart(
        comparison.scatter(
            (ranked[one], ranked[two]), (chosen[one], chosen[two]), (first, second)
        )
    )
with right:
    for label, frame in (
        (f"Only in {first}", lost),
        (f"Only in {second}", gained),
        ("In both", common),
    ):
        st.caption(f"{ui.plain(label)}: {len(frame):,} edges")
        st.dataframe(frame.head(500), hide_index=True, height=150)
