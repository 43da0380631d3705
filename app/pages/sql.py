"""SQL: the named queries and an editor; read-only, with limits."""

from __future__ import annotations

import queries
import streamlit as st
import ui

path, stamp, runs = ui.page("SQL")
if runs.empty:
    ui.nothing_yet(path)
    st.stop()

left, right = st.columns([1, 2.6])
with left:
    names = [queries.OWN, *queries.named()]
    name = st.selectbox("Query", names, key="query", bind="query-params")
    params = {}
    if name == queries.OWN:
        st.caption("Views you can read")
        st.dataframe(queries.views(path, stamp), hide_index=True, height=330)
    else:
        query = queries.named()[name]
        st.caption(ui.plain(query.about))
        params = queries.parameters(query, runs)
with right:
    if name == queries.OWN:
        text = st.text_area(
            "One SELECT, in DuckDB's SQL",
            value=queries.EXAMPLE,
            key="sql",
            bind="query-params",
            height=190,
        )
    else:
        text = queries.named()[name].sql
        st.code(text, language="sql", wrap_lines=True)
    a, b, _ = st.columns([1, 1, 2])
    limit = a.number_input(
        "Rows at most", 1, 100_000, 1000, key="limit", bind="query-params"
    )
    seconds = b.number_input(
        "Seconds at most", 1, 120, 10, key="seconds", bind="query-params"
    )

if not text.strip():
    st.stop()
with ui.guarded(), st.spinner("Asking the store …"):
    found, took = queries.answer(path, stamp, text, params, int(limit), int(seconds))
more = (
    f"the first {len(found):,} rows" if len(found) == limit else f"{len(found):,} rows"
)
st.caption(ui.plain(f"{more}, {took * 1000:.0f} ms"))
st.dataframe(found, hide_index=True)
with st.container(horizontal=True):
    csv = found.to_csv(index=False).encode()
    st.download_button("CSV", csv, "rows.csv", "text/csv", icon=":material/download:")
    st.download_button(
        "Parquet",
        found.to_parquet(index=False),
        "rows.parquet",
        icon=":material/download:",
    )
