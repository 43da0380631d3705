"""Measure the embedded model: python scripts/reproduce_embedded_model.py [FOLDER].

Prints the numbers of docs/embedded_model.md: for every task that the model learned,
accuracy on prompts it never saw and on their corrupted partners, and how much of the
metric circuits of several sizes recover on prompts that were not scored.
"""

from __future__ import annotations

import sys

import numpy as np
import torch

import circuitlab as cl
from circuitlab.data import embedded_model, held_out

TASKS = ("ioi", "greater_than", "induction", "pronouns", "agreement")
SIZES = [5, 10, 15, 20, 26, 32, 40, 52]
N_SCORED = 64


def main() -> None:
    torch.set_num_threads(1)
    folder = sys.argv[1] if len(sys.argv) > 1 else str(embedded_model())
    model = cl.load_model(folder)
    print(f"{model.shape.n_edges} edges; faithfulness by number of edges asked for")
    head = "task          n    acc  corr.    LD  corr.  alive"
    print(head + "".join(f"{size:6d}" for size in SIZES))
    for task in TASKS:
        prompts = held_out(cl.tasks.by_name(task)(1600, seed=1001, model=model))
        scored, rest = prompts.split(N_SCORED, seed=0)
        edges = cl.edge_scores(model, scored, cl.logit_diff(), method=cl.EAPIG(steps=5))
        alive = int((np.abs(edges.scores) > 1e-6).sum())
        curve = cl.curve(
            model, rest, cl.logit_diff(), edges, sizes=SIZES, scored=scored
        )
        first = curve.per_example.slice(0, len(rest))
        clean, corrupted = (
            first[c].to_numpy() for c in ("metric_full", "metric_ablated")
        )
        found = "".join(f"{f:6.2f}" for f in curve.rows["faithfulness"].to_pylist())
        print(
            f"{task:12s} {len(rest):3d}  {(clean > 0).mean():.3f}  "
            f"{(corrupted > 0).mean():.3f}  {clean.mean():5.2f} {corrupted.mean():6.2f}  "
            f"{alive:5d}{found}",
            flush=True,
        )


if __name__ == "__main__":
    main()
