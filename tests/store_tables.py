"""Small tables for the store's tests, and the processes that write them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from circuitlab.circuits import Circuit
from circuitlab.prompts import Prompts
from circuitlab.sites import ModelShape
from circuitlab.tables import (
    ACT,
    EVAL,
    PER_EXAMPLE,
    EdgeTable,
    ModelInfo,
    Run,
    edge_rows,
)

SMALL = ModelShape(2, 2, 2, 8, 4, 20)
GROUPED = ModelShape(2, 4, 2, 8, 2, 20)
CHILD = Path(__file__).with_name("store_child.py")


def model_of(shape: ModelShape, weights: str = "w") -> ModelInfo:
    return ModelInfo("toy", "gpt2", weights * 64, "float32", "transformer_lens", shape)


def run_of(kind: str = "edge", seed: int = 0, **changed) -> Run:
    policy = {
        "method": {"name": "eap_ig", "steps": 5, "rule": "midpoint"},
        "metric": {"name": "logit_diff", "higher_is_better": True},
        "ablation": {"name": "patch"},
    }
    fields = {
        "kind": kind,
        "model": model_of(SMALL),
        "dataset": "ioi",
        "dataset_digest": "d" * 64,
        "n": 8,
        "policy": policy,
        "provenance": {"sample_count": 8, "warnings": ["a", "b"], "timing_s": 0.25},
        "seed": seed,
        "started_at": f"2026-01-02T03:04:{seed % 60:02}.000+00:00",
        "seconds": 1.5,
        "versions": {"circuitlab": "0.1.0", "torch": "2.13.0", "git_commit": "abc"},
    }
    return Run(**{**fields, **changed})


def edges_of(seed: int = 0, shape: ModelShape = SMALL, **changed) -> EdgeTable:
    """An edge table with honest statuses: some edges are unreachable."""
    random = np.random.default_rng(seed)
    count = shape.n_edges
    score = random.normal(size=count) * 10.0 ** random.integers(-12, 6, count)
    error = np.abs(random.normal(size=count))
    status = np.where(random.random(count) < 0.15, "unreachable", "ok").tolist()
    rows = edge_rows(shape, score, error, 8, status)
    changed.setdefault("model", model_of(shape))
    return EdgeTable(rows, run_of(seed=seed, **changed))


def acts_of(count: int = 12) -> pa.Table:
    """ACT rows in which every column holds something, somewhere."""
    made = {
        "target_id": "t0",
        "kind": "ACT",
        "method": "grad",
        "reduction": "sum",
        "grain": "site",
        "n": 8,
        "stderr": 0.5,
        "shape": "[2, 3]",
        "dtype": "float32",
        "device": "cpu",
        "alias_group": "g1",
        "status_reason": "because",
        "differentiable": True,
        "retention": "kept",
        "capture_status": "captured",
        "resolution": "exact",
        "frozen_requested": 3,
        "frozen_resolved": 3,
        "frozen_reached": 2,
        "policy_digest": "p" * 64,
        "detached": False,
        "rescorable": True,
        "element": "4",
        "position": 7,
        "status": "ok",
    }
    rows = [
        {
            **made,
            "site": f"blocks.{i}.hook_in",
            "pass": 1,
            "address": f"blocks.{i}.hook_in:1#{i}",
            "sample_id": str(i) if i % 2 else None,
            "site_key": f"s1|blocks/{i % 5}|out|1",
            "score": float(i) / 3 - 1,
        }
        for i in range(count)
    ]
    return pa.Table.from_pylist(rows, schema=ACT)


def evals_of(circuit: Circuit, faithfulness: float = 0.9) -> tuple[pa.Table, pa.Table]:
    """An EVAL row and its PER_EXAMPLE rows."""
    row = {
        "circuit_id": circuit.id,
        "label": "circuit",
        "rank": "magnitude",
        "ablation": "patch",
        "metric_name": "logit_diff",
        "k": len(circuit),
        "n_edges": len(circuit),
        "n": 3,
        "faithfulness": faithfulness,
        "metric": 1.0,
        "metric_full": 1.1,
        "metric_ablated": -1.0,
        "prompts_overlap": False,
    }
    each = [
        {
            "circuit_id": circuit.id,
            "label": "circuit",
            "k": len(circuit),
            "prompt": i,
            "metric": 1.0 - i,
            "metric_full": 1.1,
            "metric_ablated": -1.0,
        }
        for i in range(3)
    ]
    return (
        pa.Table.from_pylist([row], schema=EVAL),
        pa.Table.from_pylist(each, schema=PER_EXAMPLE),
    )


def prompts_of() -> Prompts:
    return Prompts.from_tokens(
        [[1, 2, 3], [4, 5, 6], [7, 8, 9]],
        [[1, 2, 4], [4, 5, 7], [7, 8, 1]],
        [3, 6, 9],
        [4, 7, 1],
        name="three",
    )


def start(*arguments: object, **options) -> subprocess.Popen[str]:
    """Start `store_child.py` with these arguments."""
    command = [sys.executable, str(CHILD), *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
