"""The row of the table `run` that describes a run: its provenance as columns."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from circuitlab.kept import dump_json, dump_strict_json

_VERSIONS = ("circuitlab", "torch", "transformer-lens", "transformers", "numpy")

RUN = pa.schema(
    [
        ("run_id", pa.string()),
        ("kind", pa.string()),
        ("type", pa.string()),
        ("model", pa.string()),
        ("architecture", pa.string()),
        ("weights_digest", pa.string()),
        ("dtype", pa.string()),
        ("processing", pa.string()),
        ("backend", pa.string()),
        ("device", pa.string()),
        ("n_layers", pa.int32()),
        ("n_heads", pa.int32()),
        ("n_kv_heads", pa.int32()),
        ("d_model", pa.int32()),
        ("task", pa.string()),
        ("dataset_digest", pa.string()),
        ("n", pa.int64()),
        ("metric", pa.string()),
        ("higher_is_better", pa.bool_()),
        ("method", pa.string()),
        ("steps", pa.int32()),
        ("rule", pa.string()),
        ("ablation", pa.string()),
        ("policy_digest", pa.string()),
        ("params_digest", pa.string()),
        ("seed", pa.int64()),
        ("parent", pa.string()),
        ("started_at", pa.timestamp("us")),
        ("seconds", pa.float64()),
        ("saved_at", pa.timestamp("us")),
        *[(name.replace("-", "_"), pa.string()) for name in _VERSIONS],
        ("python", pa.string()),
        ("git_commit", pa.string()),
        ("row_counts", pa.string()),
        ("policy", pa.string()),
        ("provenance", pa.string()),
        ("versions", pa.string()),
        ("header", pa.string()),
    ]
)
"""The columns of `run`, but for `run_no`, which a store gives."""


def run_row(head: Mapping[str, Any]) -> dict[str, Any]:
    """The row for the head of a part. Times are UTC without a zone."""
    run = head["run"]
    model, policy = run["model"], run["policy"]
    shape = model.get("shape") or {}
    versions = run.get("versions") or {}
    return {
        "run_id": head["id"],
        "kind": run["kind"],
        "type": head.get("type"),
        "model": model["name"],
        **{k: model.get(k) for k in ("architecture", "weights_digest", "dtype")},
        **{k: model.get(k) for k in ("processing", "backend", "device")},
        **{k: shape.get(k) for k in ("n_layers", "n_heads", "n_kv_heads", "d_model")},
        "task": run["dataset"],
        "dataset_digest": run["dataset_digest"],
        "n": run["n"],
        **_policy_columns(policy),
        "policy_digest": head["policy_digest"],
        "params_digest": head["params_digest"],
        "seed": run.get("seed"),
        "parent": run.get("parent"),
        "started_at": _time(run.get("started_at")),
        "seconds": run.get("seconds"),
        "saved_at": _time(head["saved_at"]),
        **{name.replace("-", "_"): versions.get(name) for name in _VERSIONS},
        "python": versions.get("python"),
        "git_commit": versions.get("git_commit"),
        "row_counts": dump_json({k: f["rows"] for k, f in head["files"].items()}),
        "policy": dump_strict_json(policy),
        "provenance": dump_strict_json(run.get("provenance") or {}),
        "versions": dump_json(versions),
        "header": dump_json(head),
    }


def _policy_columns(policy: Mapping[str, Any]) -> dict[str, Any]:
    metric, method = policy.get("metric"), policy.get("method")
    better = metric.get("higher_is_better") if isinstance(metric, Mapping) else None
    inside = method if isinstance(method, Mapping) else {}
    steps = inside.get("steps", policy.get("steps"))
    rule = inside.get("rule", policy.get("rule"))
    return {
        "metric": name_in(metric),
        "higher_is_better": better,
        "method": name_in(method),
        "steps": steps if isinstance(steps, int) else None,
        "rule": rule if isinstance(rule, str) else None,
        "ablation": name_in(policy.get("ablation")),
    }


def name_in(value: object) -> str | None:
    """The name of a strategy as a policy records it: a text, or a mapping with one."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        for key in ("name", "kind", "method", "type"):
            if isinstance(value.get(key), str):
                return value[key]
    return dump_json(value)


def _time(text: str | None) -> datetime.datetime | None:
    if not text:
        return None
    try:
        at = datetime.datetime.fromisoformat(text)
    except ValueError:
        return None
    if at.tzinfo is not None:
        at = at.astimezone(datetime.UTC).replace(tzinfo=None)
    return at
