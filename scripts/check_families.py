"""Print what was measured on a tiny random model of every architecture family.

    python scripts/check_families.py            # the table of docs/models.md

`logits` is the largest difference to the plain Hugging Face model in float32, over its
largest logit; `derivative` the largest difference, in float64, between an EAP score and
the derivative of patching that edge (by autograd through the edge's own gate), over the
largest score; `float32` and `bfloat16` the drift of EAP scores against float64, likewise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from families import FAMILIES, family_model, hf_model, token_prompts

from circuitlab.ablated_side import ablated_side
from circuitlab.ablations import AblationSource, Patch
from circuitlab.backends import load_model
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_run import run_circuits
from circuitlab.edges import edge_scores
from circuitlab.errors import ModelError
from circuitlab.metrics import logit_diff

HEADER = "| family | edges | heads | block | logits | derivative | float32 | bfloat16 |"


def off(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def logits_error(family: str) -> float:
    plain = hf_model(family, torch.float32)
    model = load_model(plain)
    batch = model.batch(token_prompts().clean)
    with torch.no_grad():
        expected = plain(batch.tokens).logits
    return off(model.run(batch).numpy(), expected.numpy())


def derivative(model) -> np.ndarray:
    """−∂M/∂gate of every edge at the full circuit."""
    prompts = token_prompts()
    source = AblationSource(model, prompts, Patch(), logit_diff())
    rows = source.rows(slice(0, len(prompts)))
    gates = torch.ones(1, *model.shape.edge_mask.shape, dtype=model.dtype)
    side = ablated_side(model, rows)
    positions = rows.clean.last
    logits = run_circuits(
        model, Chunk(rows.clean, side, positions), gates.requires_grad_()
    )
    metric = logit_diff()(logits[0], rows.clean).mean()
    (gradient,) = torch.autograd.grad(metric, [gates])
    return -gradient[0].numpy()[model.shape.edge_indices]


def drift(family: str, dtype: torch.dtype, exact: np.ndarray) -> str:
    try:
        model = family_model(family, dtype)
    except ModelError as refused:
        return f"`{refused.code}`"
    return f"{off(edge_scores(model, token_prompts(), logit_diff()).scores, exact):.0e}"


def row(family: str) -> str:
    model = family_model(family)
    exact = edge_scores(model, token_prompts(), logit_diff()).scores
    shape = model.shape
    grouped = shape.n_kv_heads != shape.n_heads
    cells = [
        family,
        f"{shape.n_edges}",
        f"{shape.n_heads} query, {shape.n_kv_heads} key/value"
        if grouped
        else "multi-head",
        "parallel" if shape.parallel else "sequential",
        f"{logits_error(family):.0e}",
        f"{off(exact, derivative(model)):.0e}",
        drift(family, torch.float32, exact),
        drift(family, torch.bfloat16, exact),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    torch.set_num_threads(1)
    print(HEADER)
    print("|" + "---|" * (HEADER.count("|") - 1))
    for family in FAMILIES:
        print(row(family), flush=True)


if __name__ == "__main__":
    main()
