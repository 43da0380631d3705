"""What the Sweeps page shows: circuits as points, and the jobs of sweeps."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import charts
import pandas as pd


def points(rows: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Evaluated circuits with `series` (how they were found) and `front`."""
    methods = runs.set_index("run_id")["method"]
    kept = rows.dropna(subset=["faithfulness", "n_edges"]).reset_index(drop=True)
    found = kept["scores"].map(methods).fillna("circuit")
    ranked = kept["rank"].map(lambda rank: f", {rank}" if isinstance(rank, str) else "")
    kept = kept.assign(series=found + ranked)
    return kept.assign(front=charts.front_of(kept))


def plans(path: str) -> pd.DataFrame:
    """The sweeps whose steps are kept beside the store, the latest first: cells done and
    failed, circuits found, and the time of the last step (UTC)."""
    if "://" in path:
        return pd.DataFrame()
    rows = []
    for log in Path(path).parent.glob("sweeps/*/steps.jsonl"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            rows.append(_progress(log))
    found = pd.DataFrame(rows)
    return found if found.empty else found.sort_values("last step", ascending=False)


def _progress(log: Path) -> dict[str, object]:
    """One sweep. A last line that is being written is left out."""
    whole = log.read_text(encoding="utf-8").rpartition("\n")[0]
    head, *steps = [json.loads(line) for line in whole.split("\n") if line]
    done = {step["cell"]: step for step in steps if step["ok"]}
    failed = {step["cell"] for step in steps if not step["ok"]} - done.keys()
    return {
        "sweep": head["name"],
        "cells done": len(done),
        "cells failed": len(failed),
        "circuits": sum(len(step["rows"]) for step in done.values()),
        "last step": pd.to_datetime(log.stat().st_mtime, unit="s"),
    }


def tagged(rows: pd.DataFrame, runs: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """The evaluations of one sweep: its runs have the tag `sweep:<name>`."""
    mine = [f"sweep:{sweep}" in tags for tags in runs["tags"]]
    return rows[rows["eval_run"].isin(runs.loc[mine, "run_id"])]
