"""Time and memory of edge scores beside the floor and TransformerLens' own.

The floor is what no first-order method can do without: on the plain Hugging Face model
(eager attention, frozen parameters), one forward without gradients on the corrupted
prompts, one forward and one backward to activations on the clean ones, unembedding one
position. All legs run interleaved in one process on one thread; CPU seconds, medians.

    python scripts/bench_edges.py                    # GPT-2-small shape, 8x16 and 32x32
    python scripts/bench_edges.py --model FOLDER     # a real model too, 8 x 16 tokens
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import transformers
from transformer_lens.tools.analysis.attribution_patching import (
    EdgeAttributionConfig,
    attribution_patch,
)

from circuitlab.backends import load_model
from circuitlab.circuits import top_k
from circuitlab.edges import edge_scores
from circuitlab.evaluate import measure
from circuitlab.methods import EAP, EAPIG
from circuitlab.metrics import logit_diff
from circuitlab.prompts import Prompts

Leg = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One model shape and one batch of random pairs that differ from position 3 on."""

    name: str
    hf: transformers.PreTrainedModel
    clean: torch.Tensor
    corrupted: torch.Tensor
    answers: torch.Tensor
    wrong: torch.Tensor

    @property
    def prompts(self) -> Prompts:
        return Prompts.from_tokens(self.clean, self.corrupted, self.answers, self.wrong)

    def difference(self, logits: torch.Tensor) -> torch.Tensor:
        right = logits.gather(-1, self.answers[:, None])
        return (right - logits.gather(-1, self.wrong[:, None])).sum()


def case(name: str, hf: transformers.PreTrainedModel, n: int, length: int) -> Case:
    hf = hf.eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    vocab = hf.config.vocab_size

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(1, vocab, size, generator=generator)

    clean = draw(n, length)
    corrupted = clean.clone()
    corrupted[:, 3:6] = draw(n, 3)
    return Case(name, hf, clean, corrupted, draw(n), draw(n))


def gpt2_small() -> transformers.PreTrainedModel:
    """GPT-2 small's shape with a small vocabulary and random weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=1000, n_positions=64)
    config.bos_token_id = config.eos_token_id = None
    return transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )


def first_block(hf: transformers.PreTrainedModel) -> torch.nn.Module:
    stacks = [m for m in hf.modules() if isinstance(m, torch.nn.ModuleList)]
    return max(stacks, key=len)[0]


def body(case: Case, tokens: torch.Tensor) -> torch.Tensor:
    hidden = case.hf.base_model(tokens, use_cache=False).last_hidden_state
    return case.hf.get_output_embeddings()(hidden[:, -1])


def forward(case: Case) -> None:
    with torch.no_grad():
        body(case, case.corrupted)


def forward_backward(case: Case) -> None:
    start: list[torch.Tensor] = []

    def leaf(_module, args, kwargs):
        start.append(args[0].detach().requires_grad_())
        return (start[0], *args[1:]), kwargs

    handle = first_block(case.hf).register_forward_pre_hook(leaf, with_kwargs=True)
    try:
        logits = body(case, case.clean)
    finally:
        handle.remove()
    torch.autograd.grad(case.difference(logits), start)


def floor(case: Case) -> None:
    forward(case)
    forward_backward(case)


def transformer_lens_pair(model, case: Case) -> dict:
    """TransformerLens' own edge attribution on the first pair."""

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, case.answers[0]] - logits[0, -1, case.wrong[0]]

    config = EdgeAttributionConfig(granularity="edge")
    pair = case.clean[:1], case.corrupted[:1]
    model.bridge.requires_grad_(True)  # it differentiates from the embedding on
    try:
        return attribution_patch(model.bridge, *pair, metric, config).edge_scores
    finally:
        model.bridge.requires_grad_(False)


def agreement(model, case: Case) -> float:
    """Largest difference to TransformerLens' scores, over the largest score.

    Theirs are summed over positions; they take the gradient at the corrupted run and
    the opposite difference, so the two prompts change places in ours.
    """
    theirs: dict[str, float] = {}
    for (sender, receiver), score in transformer_lens_pair(model, case).items():
        name = f"{component(sender)}->{component(receiver)}"
        theirs[name] = theirs.get(name, 0.0) + score
    one = slice(0, 1)
    swapped = Prompts.from_tokens(
        case.corrupted[one], case.clean[one], case.answers[one], case.wrong[one]
    )
    ours = edge_scores(model, swapped, logit_diff())
    names = ours.rows["edge"].to_pylist()
    expected = np.array([theirs[name] for name in names])
    return float(np.abs(ours.scores - expected).max() / np.abs(expected).max())


def component(node) -> str:
    match node.kind:
        case "embed":
            return "input"
        case "attn_head_out":
            return f"a{node.layer}.h{node.head}"
        case "mlp_out" | "mlp_in":
            return f"m{node.layer}"
        case "logits":
            return "logits"
        case port:
            return f"a{node.layer}.h{node.head}<{port[0]}>"


# --- measuring ---


def cpu_seconds(leg: Leg) -> float:
    start = time.process_time()
    leg()
    return time.process_time() - start


def interleaved(legs: dict[str, Leg], rounds: int) -> dict[str, list[float]]:
    for leg in legs.values():
        leg()
    found: dict[str, list[float]] = {name: [] for name in legs}
    for _ in range(rounds):
        for name, leg in legs.items():
            found[name].append(cpu_seconds(leg))
    return found


def median_ratio(times: dict[str, list[float]], leg: str, over) -> float:
    rounds = range(len(times[leg]))
    return statistics.median(times[leg][i] / over(i) for i in rounds)


def peak_megabytes(leg: Leg) -> float | None:
    """Peak resident memory of one call above its start; None where Linux is not."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not clear.exists():
        return None
    leg()
    clear.write_text("5")
    before = _resident(status, "VmRSS")
    leg()
    return (_resident(status, "VmHWM") - before) / 1024


def _resident(status: Path, field: str) -> int:
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def bench(case: Case, rounds: int, steps: int, peer: bool) -> dict[str, float | str]:
    model = load_model(case.hf)
    prompts, metric = case.prompts, logit_diff()
    legs: dict[str, Leg] = {
        "forward": lambda: forward(case),
        "floor": lambda: floor(case),
        "eap": lambda: edge_scores(model, prompts, metric, method=EAP()),
        "eap_ig": lambda: edge_scores(model, prompts, metric, method=EAPIG(steps)),
    }
    table = edge_scores(model, prompts, metric)
    sizes = [int(f * table.shape.n_edges) for f in (0.002, 0.005, 0.01, 0.02, 0.05)]
    circuits = [top_k(table, k) for k in sizes]
    legs["5 circuits"] = lambda: measure(model, prompts, metric, circuits)
    if peer:
        legs["transformer_lens, one pair"] = lambda: transformer_lens_pair(model, case)
    times = interleaved(legs, rounds)
    row: dict[str, float | str] = {"case": case.name}
    for name, found in times.items():
        row[f"{name} (CPU s)"] = statistics.median(found)
    floors, forwards = times["floor"], times["forward"]
    row["EAP / floor"] = median_ratio(times, "eap", lambda i: floors[i])
    row["EAP-IG / floor"] = median_ratio(
        times, "eap_ig", lambda i: steps * (floors[i] - forwards[i]) + forwards[i]
    )
    count = len(circuits) + 1
    row["5 circuits / 6 forwards"] = median_ratio(
        times, "5 circuits", lambda i: count * forwards[i]
    )
    if peer:
        pairs = len(prompts)
        row["TransformerLens x pairs / EAP"] = median_ratio(
            times, "transformer_lens, one pair", lambda i: times["eap"][i] / pairs
        )
        row["agreement with TransformerLens"] = agreement(model, case)
    row |= memory(model, case, legs)
    return row


def memory(model, case: Case, legs: dict[str, Leg]) -> dict[str, float]:
    """Peaks beyond the floor's own, and over the sender-difference buffer."""
    buffer = len(model.shape.senders) * case.clean.numel() * model.shape.d_model * 4
    floor_peak, eap_peak = peak_megabytes(legs["floor"]), peak_megabytes(legs["eap"])
    if floor_peak is None or eap_peak is None:
        return {}
    megabytes = buffer / 2**20
    return {
        "sender differences (MB)": megabytes,
        "floor peak (MB)": floor_peak,
        "EAP peak (MB)": eap_peak,
        "beyond the floor / buffer": (eap_peak - floor_peak) / megabytes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a model folder, measured as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="only 8 x 16 tokens")
    parser.add_argument("--json", default="bench_edges.json", help="where the rows go")
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(case("GPT-2 small shape, 8 x 16", gpt2_small(), 8, 16), True)]
    if not options.small:
        cases.append((case("GPT-2 small shape, 32 x 32", gpt2_small(), 32, 32), False))
    if options.model:
        hf = transformers.AutoModelForCausalLM.from_pretrained(
            options.model, attn_implementation="eager", dtype=torch.float32
        )
        name = Path(options.model).name
        cases.append((case(f"{name}, 8 x 16", hf, 8, 16), False))
    rows = [bench(one, options.rounds, options.steps, peer) for one, peer in cases]
    for row in rows:
        print(f"\n{row.pop('case')}")
        for name, value in row.items():
            print(f"  {name:32} {value:10.3g}")
    Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
