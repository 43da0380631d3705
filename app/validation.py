"""What the Validate page shows of evaluations: lines, points, examples."""

from __future__ import annotations

import charts
import data
import pandas as pd
import streamlit as st
import ui
from view import View

from circuitlab.store import Store

ABLATIONS = {
    "patch": "patch: the corrupted prompt's values (patch_from)",
    "mean": "mean over the corrupted prompts (mean_ablate)",
    "mean_positional": "mean at each position (mean_ablate)",
    "zero": "zero (zero_ablate)",
    "resample": "another corrupted prompt's values (resample)",
}
METRICS = ["as scored", "logit_diff", "prob_diff", "answer_logprob", "kl"]
COLUMNS = [
    "label",
    "n_edges",
    "faithfulness",
    "faithfulness_low",
    "faithfulness_high",
    "completeness",
    "metric",
    "metric_full",
    "metric_ablated",
    "kl",
    "accuracy",
    "ablation",
    "metric_name",
    "n",
    "prompts_overlap",
]


def saved_circuit(path: str, kind: str, view: View) -> str:
    """The run id of the circuit on the screen, saved if it is new."""
    ranked = data.ranked_for(path, kind, view)
    chosen = data.selection(path, kind, view)
    if kind == "circuit" and len(chosen.kept) == len(ranked.names):
        return view.run
    return Store(path).save(chosen.circuit(ranked, view))


def options(path: str, key: str) -> list[str]:
    """The form's choices, as options of the command line."""
    left, middle, right = st.columns(3)
    ablation = left.selectbox(
        "Other edges carry",
        list(ABLATIONS),
        format_func=ABLATIONS.__getitem__,
        key=f"{key}-abl",
    )
    metric = middle.selectbox("Metric", METRICS, key=f"{key}-metric")
    on = right.selectbox("Prompts", ["held-out", "scored"], key=f"{key}-on")
    found = ["--ablation", ablation, "--on", on]
    return found if metric == METRICS[0] else [*found, "--metric", metric]


def with_series(rows: pd.DataFrame) -> pd.DataFrame:
    """EVAL rows of curves, with the line that each belongs to (`series`, `kind`). Random
    circuits of one size are one point: their mean, and the range of 95 % of them."""
    kept = rows.dropna(subset=["faithfulness", "n_edges"])
    own = kept[kept["label"] == "circuit"]
    rank = own["rank"].fillna("single circuits")
    own = own.assign(series=rank + ", " + own["metric_name"] + ", " + own["ablation"])
    random = kept[kept["label"] == "random"]
    if random.empty:
        return own.assign(kind="circuit")
    by = ["metric_name", "ablation", "n_edges"]
    found = [_mean_of(part) for _, part in random.groupby(by, sort=False)]
    return pd.concat(
        [own.assign(kind="circuit"), pd.DataFrame(found)], ignore_index=True
    )


def _mean_of(draws: pd.DataFrame) -> pd.Series:
    """One row for random circuits of one size."""
    first = draws.iloc[0].copy()
    values = draws["faithfulness"]
    first["faithfulness"], first["kl"] = values.mean(), draws["kl"].mean()
    if len(draws) > 1:
        first["faithfulness_low"] = values.quantile(0.025)
        first["faithfulness_high"] = values.quantile(0.975)
    names = ["random circuits", first["metric_name"], first["ablation"]]
    first["series"], first["kind"] = ", ".join(names), "random"
    return first


def curve(rows: pd.DataFrame, here: str) -> pd.Series | None:
    """Draw the curve; returns the row of a clicked point."""
    shown = with_series(rows)
    if shown.empty:
        return None
    columns = [c for c in shown.columns if c not in ("saved_at", "tags")]
    event = st.altair_chart(
        charts.curve_chart(shown[columns], here),
        on_select="rerun",
        selection_mode="point",
        key="curve",
    )
    picked = (event or {}).get("selection", {}).get("point", [])
    if not picked:
        return None
    match = shown[shown["circuit_id"] == picked[0].get("circuit_id")]
    return None if match.empty else match.iloc[0]


def table(rows: pd.DataFrame) -> None:
    """Every evaluation as a row."""
    columns = [c for c in COLUMNS if rows[c].notna().any()]
    newest = rows.sort_values("saved_at", ascending=False, kind="stable")
    numbers = {
        c: st.column_config.NumberColumn(format="%.3f")
        for c in columns
        if rows[c].dtype.kind == "f"
    }
    st.dataframe(newest[columns], hide_index=True, column_config=numbers, height=260)


def completeness(rows: pd.DataFrame, here: str) -> None:
    """The newest full validation of the circuit on the screen, or else of any: what is
    left outside it, and what changes when a part of it leaves."""
    known = rows[rows["label"].isin(["complement", "without"])]
    if known.empty:
        _numbers(None, None)
        return
    own = rows[(rows["circuit_id"] == here) & rows["eval_run"].isin(known["eval_run"])]
    pool = own if len(own) else known
    newest = pool.sort_values("saved_at", kind="stable")["eval_run"].iloc[-1]
    rows = rows[rows["eval_run"] == newest]
    parts = rows[rows["label"] == "without"]
    complement = rows.loc[rows["label"] == "complement", "faithfulness"]
    least = float(parts["change"].min()) if len(parts) else None
    _numbers(float(complement.iloc[0]) if len(complement) else None, least)
    if not len(own):
        st.caption("Of another circuit of this run.")
    if len(parts):
        columns = ["subject", "change", "change_low", "change_high"]
        st.dataframe(
            parts.sort_values("change", ascending=False)[columns],
            hide_index=True,
            height=235,
            column_config={"subject": "without", "change": "faithfulness lost"},
        )


def _numbers(outside: float | None, least: float | None) -> None:
    left, right = st.columns(2)
    left.metric(
        "Outside",
        "–" if outside is None else f"{outside:.3f}",
        border=True,
        help="Completeness: the faithfulness of all edges outside the circuit. It is "
        "near 0 where the circuit is complete.",
    )
    right.metric(
        "Least part",
        "–" if least is None else f"{least:+.3f}",
        border=True,
        help="Minimality: the least change of faithfulness when one part leaves the "
        "circuit. It is near 0, or below, where the circuit could do without one.",
    )


def examples(path: str, stamp: str, row: pd.Series) -> None:
    """One evaluation's prompts: tokens tinted by how much of the effect is kept."""
    query = """
        select prompt, metric, metric_full, metric_ablated, kl from v_per_example
        where run_id = ? and circuit_id = ? and label = ? and k is not distinct from ?
        order by prompt
    """
    k = None if pd.isna(row["k"]) else int(row["k"])
    key = (row["eval_run"], row["circuit_id"], row["label"], k)
    found = data.sql(path, stamp, query, key)
    if found.empty:
        st.caption("This evaluation has no numbers by example.")
        return
    gap = found["metric_full"] - found["metric_ablated"]
    found["kept"] = (found["metric"] - found["metric_ablated"]) / gap.where(gap != 0)
    prompts = data.prompts(path, stamp, row["dataset_digest"])
    if prompts is not None:
        ui.prompt_table(prompts.to_pylist(), found)
    with st.expander("Numbers by example", expanded=prompts is None):
        st.dataframe(found, hide_index=True)
