"""What the Sweeps page shows: circuits as points, and the jobs of sweeps."""

from __future__ import annotations

import charts
import pandas as pd
import streamlit as st
import ui
import worker


def points(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Evaluated circuits with `series` (how they were found) and `front`."""
    methods = runs.set_index("run_id")["method"]
    kept = rows.dropna(subset=["faithfulness", "n_edges"]).reset_index(drop=True)
    found = kept["scores"].map(methods).fillna("circuit")
    ranked = kept["rank"].map(lambda rank: f", {rank}" if isinstance(rank, str) else "")
    kept = kept.assign(series=found + ranked)
    return kept.assign(front=charts.front_of(kept))


def plans(path: str) -> None:
    """Sweeps that were started from the app, with their progress."""
    found = [job for job in worker.recent(path) if job.facts["command"][0] == "sweep"]
    for job in found[:5]:
        done = job.progress if job.state == "running" else float(job.state == "done")
        title = f"{job.facts['title']}: {job.state}, {job.seconds:.0f} s"
        st.progress(done or 0.0, text=ui.plain(title))
