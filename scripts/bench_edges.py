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
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
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

    def shortened(self) -> Case:
        """The first pair alone, cut to its first tokens."""
        return replace(
            self,
            clean=self.clean[:1, :5],
            corrupted=self.corrupted[:1, :5],
            answers=self.answers[:1],
            wrong=self.wrong[:1],
        )

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
    unembed = case.hf.get_output_embeddings()
    assert unembed is not None
    return unembed(hidden[:, -1])


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


def peak_megabytes(which: str, leg: str, model: str | None) -> float | None:
    """Peak resident memory of one leg above its start, in a process of its own.

    The C library gives freed tensors back at once there (MALLOC_MMAP_THRESHOLD_), so
    that what is resident is what is alive. None where the system is not Linux.
    """
    if not Path("/proc/self/clear_refs").exists():
        return None
    command = [sys.executable, __file__, "--peak", leg, "--case", which]
    command += ["--model", model] if model else []
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return float(done.stdout.split()[-1])


def print_peak(one: Case, leg: str) -> None:
    """Run a leg once on two tokens, to load code, then whole; print the peak."""
    model = load_model(one.hf)
    legs: dict[str, Callable[[Case], object]] = {
        "floor": floor,
        "eap": lambda some: edge_scores(model, some.prompts, logit_diff()),
    }
    legs[leg](one.shortened())
    status = Path("/proc/self/status")
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident(status, "VmRSS")
    legs[leg](one)
    print((_resident(status, "VmHWM") - before) / 1024)


def _resident(status: Path, field: str) -> int:
    lines = status.read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def bench(case: Case, rounds: int, steps: int, peer: bool) -> dict[str, float]:
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
    row: dict[str, float] = {}
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
    return row


def memory(one: Case, which: str, folder: str | None) -> dict[str, float]:
    """Peaks beyond the floor's own, and over the sender-difference buffer."""
    peaks = [peak_megabytes(which, leg, folder) for leg in ("floor", "eap")]
    if peaks[0] is None or peaks[1] is None:
        return {}
    shape = load_model(one.hf).shape
    megabytes = len(shape.senders) * one.clean.numel() * shape.d_model * 4 / 2**20
    return {
        "sender differences (MB)": megabytes,
        "floor peak (MB)": peaks[0],
        "EAP peak (MB)": peaks[1],
        "beyond the floor / buffer": (peaks[1] - peaks[0]) / megabytes,
    }


def build(which: str, folder: str | None) -> Case:
    if which == "real":
        assert folder is not None
        hf = transformers.AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="eager", dtype=torch.float32
        )
        return case(f"{Path(folder).name}, 8 x 16", hf, 8, 16)
    n, length = (8, 16) if which == "small" else (32, 32)
    return case(f"GPT-2 small shape, {n} x {length}", gpt2_small(), n, length)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="a model folder, measured as well")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--case", action="append", choices=("small", "large", "real"))
    parser.add_argument("--json", default="bench_edges.json", help="where the rows go")
    parser.add_argument("--peak", choices=("floor", "eap"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = options.case or ["small", "large", *(["real"] if options.model else [])]
    if options.peak:
        print_peak(build(cases[0], options.model), options.peak)
        return
    rows = []
    for which in cases:
        one = build(which, options.model)
        row = bench(one, options.rounds, options.steps, peer=which == "small")
        rows.append(row | memory(one, which, options.model))
        print(f"\n{one.name}")
        for name, value in rows[-1].items():
            print(f"  {name:34} {value:10.3g}", flush=True)
    Path(options.json).write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
