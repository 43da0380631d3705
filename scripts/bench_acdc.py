"""ACDC beside the plain sequential algorithm, in one run: cost, and the same circuit.

    python scripts/bench_acdc.py                      # the embedded model, small shapes
    python scripts/bench_acdc.py --model FOLDER --prompts pairs.jsonl --top 150 --n 4

The sequential reference uses the same kernel, one whole pass for every tested edge, and
skips the same dead receivers. Component evaluations count the head and MLP outputs that
are computed, summed over the circuits measured. CPU time is this process's.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

import circuitlab as cl
from circuitlab.acdc import acdc
from circuitlab.metrics import Metric


@dataclass(frozen=True)
class Case:
    name: str
    model: Any
    prompts: cl.Prompts
    metric: Metric
    threshold: float
    start: cl.Circuit | None = None


def embedded(n: int) -> Iterator[Case]:
    model = cl.load_model("embedded")
    for task in ("ioi", "greater_than", "induction"):
        prompts = cl.tasks.by_name(task)(n=n, seed=0, model=model)
        yield Case(f"embedded {task}", model, prompts, cl.kl(), 0.05)
        yield Case(f"embedded {task}", model, prompts, cl.logit_diff(), 0.1)


def random_model(config: Any) -> Any:
    """Random weights, large enough that edges differ in what they do."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.copy_(torch.randn_like(weight) * config.hidden_size**-0.5)
            elif "bias" in name:
                weight.copy_(torch.randn_like(weight) * 0.1)
    return cl.load_model(model)


def gpt2(layers: int, heads: int, width: int) -> Any:
    return transformers.GPT2Config(
        vocab_size=500, n_embd=width, n_layer=layers, n_head=heads, n_positions=64
    )


def gemma2(layers: int, heads: int, width: int) -> Any:
    """Post-norms: heads act on each other."""
    return transformers.Gemma2Config(
        vocab_size=500,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=width // heads,
        query_pre_attn_scalar=width // heads,
        intermediate_size=2 * width,
        max_position_embeddings=64,
    )


def shapes(n: int) -> Iterator[Case]:
    for config, threshold in (
        (gpt2(4, 4, 64), 0.01),
        (gpt2(6, 8, 256), 0.004),
        (gemma2(6, 8, 256), 0.004),
    ):
        model = random_model(config)
        generator = torch.Generator().manual_seed(1)
        clean = torch.randint(1, 500, (n, 16), generator=generator)
        corrupted = clean.clone()
        corrupted[:, (4, 9)] = torch.randint(1, 500, (n, 2), generator=generator)
        pairs = cl.Prompts.from_tokens(clean, corrupted, clean[:, 0], corrupted[:, 4])
        name = f"random {config.model_type}, {model.shape.n_layers} layers"
        yield Case(name, model, pairs, cl.kl(), threshold)


def given(args: argparse.Namespace) -> Iterator[Case]:
    model = cl.load_model(args.model)
    prompts = cl.Prompts.from_file(args.prompts, model=model)[: args.n]
    scores = cl.edge_scores(model, prompts, cl.logit_diff(), method=cl.EAPIG(5))
    start = cl.top_k(scores, args.top) if args.top else None
    yield Case(args.model, model, prompts, cl.kl(), args.threshold, start)


def measure(case: Case, speculate: int) -> dict[str, Any]:
    """Both algorithms on one case; the circuits must be equal."""
    # The reference stands with the tests, which no installation holds.
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests.sequential_acdc import sequential_acdc

    clock = time.process_time()
    plain = sequential_acdc(
        case.model, case.prompts, case.metric, case.threshold, case.start
    )
    plain_cpu = time.process_time() - clock
    clock = time.process_time()
    found = acdc(
        case.model,
        case.prompts,
        case.metric,
        case.threshold,
        case.start,
        speculate=speculate,
    )
    cpu = time.process_time() - clock
    facts = {**found.provenance, **(found.run.provenance if found.run else {})}
    return {
        "edges": f"{len(found)}/{facts['universe']}",
        "equal": found.edges == plain.edges,
        "calls": f"{plain.calls} -> {facts['metric_calls']}",
        "passes": f"{plain.calls} -> {facts['passes']}",
        "components": f"{plain.components} -> {facts['component_evaluations']}",
        "x": round(plain.components / max(facts["component_evaluations"], 1), 1),
        "cpu": f"{plain_cpu:.2f} -> {cpu:.2f} s",
        "cpu x": round(plain_cpu / cpu, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--prompts")
    parser.add_argument("--top", type=int, default=0)
    parser.add_argument("--threshold", type=float, default=0.01)
    parser.add_argument("--n", type=int, default=16)
    parser.add_argument("--speculate", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.model:
        cases = given(args)
    else:
        cases = (case for make in (embedded, shapes) for case in make(args.n))
    equal = True
    for case in cases:
        for speculate in args.speculate:
            row = measure(case, speculate)
            equal &= row["equal"]
            head = f"{case.name}, {case.metric.name}, τ = {case.threshold:g}"
            print(f"{head}, speculate {speculate}")
            print("   ", "  ".join(f"{key}: {value}" for key, value in row.items()))
            sys.stdout.flush()
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
