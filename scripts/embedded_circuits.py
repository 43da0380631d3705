"""Fix the embedded model's circuits, and hold every method against them.

    python scripts/embedded_circuits.py --fix PATH   # write the circuits (seed 0)
    python scripts/embedded_circuits.py PATH         # the table of docs/embedded_model.md

Two circuits a task, from 32 prompts of seed 0: `exact` holds the edges whose exact effect
on the logit difference is at least 2 % of what corrupting everything does; `acdc` what
ACDC keeps by KL at a threshold of 0.05. Methods are scored on 64 prompts of seed 1, and
each gives as many edges, by magnitude, as the circuit it is held against has: then
precision equals recall, and no threshold is tuned.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

import circuitlab as cl
from circuitlab.acdc import acdc
from circuitlab.circuits import auroc
from circuitlab.evaluate import measure
from circuitlab.exact import exact_effects

TASKS = ("ioi", "greater_than", "induction", "pronouns", "agreement")
METHODS = {
    "EAP": cl.EAP(),
    "EAP, q-k corrected": cl.EAP(qk_correction=True),
    "clean-corrupted": cl.CleanCorrupted(),
    "EAP-IG 5": cl.EAPIG(5),
    "EAP-IG 5, activations": cl.EAPIG(5, path="activations"),
    "exact": cl.Exact(),
}


def fixed(model, task: str) -> dict[str, list[str]]:
    """A task's two circuits, each as its edges in canonical order."""
    prompts = cl.tasks.by_name(task)(n=32, seed=0, model=model)
    effects = exact_effects(model, prompts, cl.logit_diff())
    empty = measure(model, prompts, cl.logit_diff(), [])
    span = abs(float(empty.full.mean() - empty.ablated.mean()))
    strong = np.abs(effects.scores) >= 0.02 * span
    names = np.array(effects.rows["edge"].to_pylist())
    found = acdc(model, prompts, threshold=0.05)
    return {"exact": names[strong].tolist(), "acdc": list(found.ordered)}


def recall(table, truth: list[str]) -> float:
    """Share of the truth among as many edges of largest score, unpruned."""
    found = cl.top_k(table, len(truth), prune=False)
    return len(found.edges & set(truth)) / len(truth)


def rows(model, circuits: dict[str, dict[str, list[str]]]):
    """(task, truth, edges, method, recall, AUROC), each method on prompts of seed 1."""
    for task, truths in circuits.items():
        prompts = cl.tasks.by_name(task)(n=64, seed=1, model=model)
        for name, method in METHODS.items():
            table = cl.edge_scores(model, prompts, cl.logit_diff(), method=method)
            for kind, edges in truths.items():
                truth = cl.Circuit.from_edges(edges, model.shape)
                area = auroc(table, truth, rank="magnitude")
                yield task, kind, len(edges), name, recall(table, edges), area


def print_table(found: list[tuple]) -> None:
    print(f"| task | circuit | edges | {' | '.join(METHODS)} |")
    print("|" + "---|" * (3 + len(METHODS)))
    for task in TASKS:
        for kind in ("exact", "acdc"):
            own = [row for row in found if row[:2] == (task, kind)]
            cells = [f"{row[4]:.2f} / {row[5]:.2f}" for row in own]
            print(f"| {task} | {kind} | {own[0][2]} | {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("path", type=Path)
    parser.add_argument("--fix", action="store_true", help="write the circuits")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = cl.load_model("embedded")
    if options.fix:
        circuits = {task: fixed(model, task) for task in TASKS}
        options.path.write_text(json.dumps(circuits, indent=1) + "\n")
        return
    print_table(list(rows(model, json.loads(options.path.read_text()))))


if __name__ == "__main__":
    main()
