"""Time reads against one call per site, targets in batches, and captures.

    python scripts/bench_reads.py            # GPT-2-small shape, random weights
    python scripts/bench_reads.py --small    # a toy, in seconds

Everything runs in one process on one thread; times are CPU seconds, and what is compared
is interleaved. Legs that would take hours are timed on a sample and extrapolated, and
say so. The numbers of the page that described this first stand beside them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from captum.attr import LayerGradientXActivation

from circuitlab.backends import Backend, load_model
from circuitlab.reads import read, seed
from circuitlab.trace import capture

PARTS = {
    "attn.c_proj": "attn.o.hook_out",
    "mlp.c_proj": "mlp.out.hook_out",
    "": "hook_out",
}
"""Three sites a layer: 36 of them in 12 layers, as the page has."""


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="a toy model")
    parser.add_argument("--targets", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    bench = Bench(options.small, options.targets, options.tokens, options.rounds)
    found = {**bench.sites_against_calls(), **bench.batches(), **bench.captures()}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(bench.header())
    for name, value in found.items():
        print(f"{name:<62} {value}")


def cpu(work: Callable[[], Any]) -> float:
    """CPU seconds of one call."""
    start = time.process_time()
    work()
    return time.process_time() - start


class Bench:
    """A model, its prompt, and the legs."""

    def __init__(self, small: bool, targets: int, tokens: int, rounds: int):
        sizes: dict[str, Any] = {
            "n_embd": 64,
            "n_layer": 12,
            "n_head": 4,
            "vocab_size": 1000,
        }
        config = transformers.GPT2Config(**(sizes if small else {}))
        torch.manual_seed(0)
        self.hf: Any = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        ).eval()
        self.model: Backend = load_model(self.hf)
        self.rows = torch.randint(1, config.vocab_size, (1, tokens))
        self.targets = targets
        self.rounds = rounds
        self.paths = {
            f"transformer.h.{layer}.{part}".rstrip("."): f"blocks.{layer}.{site}"
            for layer in range(config.n_layer)
            for part, site in PARTS.items()
        }
        # The inventory of sites is taken once per model; not part of any leg.
        capture(self.model, self.rows, [])

    def header(self) -> str:
        sizes = (len(self.paths), self.targets, self.rows.shape[1])
        return "{} sites x {} targets, 1 x {} tokens, CPU seconds, one thread".format(
            *sizes
        )

    def seeds(self, count: int) -> list[Any]:
        return [seed("unembed.hook_out", index=(0, -1, i)) for i in range(count)]

    # --- all sites at once against a call per site ---

    def sites_against_calls(self) -> dict[str, Any]:
        sites = list(self.paths.values())
        calls = []

        def ours() -> None:
            trace = capture(self.model, self.rows, sites)
            table = read(trace, self.seeds(self.targets), sites, None)
            calls.append(table.provenance["autograd_calls"])

        reading = cpu(ours)
        pairs = len(sites) * self.targets
        sampled = list(self.paths)[:: max(1, len(sites) // 6)]
        captum = (
            statistics.mean(cpu(lambda p=p: self.captum(p, 3)) for p in sampled) / 3
        )
        plain = cpu(lambda: self.autograd(sampled, 3)) / (3 * len(sampled))
        sample = f"extrapolated from {3 * len(sampled)} of {pairs:,} calls"
        backward = pairs / calls[0]
        return {
            "one capture and read, measured": f"{reading:.1f} s",
            "  passes of the read": f"1 forward, {calls[0]} backward",
            "Captum, one call per site and target": f"{captum * pairs:,.0f} s ({sample})",
            "  passes of Captum": f"{pairs:,} forward, {pairs:,} backward",
            "autograd.grad, one call per site and target": (
                f"{plain * pairs:,.0f} s ({sample})"
            ),
            "Captum / read, CPU time (the page: 352x)": f"{captum * pairs / reading:.0f}x",
            "autograd.grad / read, CPU time (the page: 438x)": (
                f"{plain * pairs / reading:.0f}x"
            ),
            "backward passes, per-site calls / read": f"{backward:,.0f}x",
        }

    def captum(self, path: str, targets: int) -> None:
        """A forward and a backward for every target at one site."""

        def logit(tokens: Any, token: int) -> Any:
            return self.hf(tokens, use_cache=False).logits[:, -1, token]

        layer = self.hf.get_submodule(path)
        method = LayerGradientXActivation(logit, layer)
        for token in range(targets):
            method.attribute(self.rows, additional_forward_args=(token,))

    def autograd(self, paths: list[str], targets: int) -> None:
        """One graph, and a backward for every site and target."""
        kept: dict[str, Any] = {}

        def keep(path: str) -> Callable:
            def hook(_module: Any, _args: Any, output: Any) -> None:
                kept[path] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [
            self.hf.get_submodule(path).register_forward_hook(keep(path))
            for path in paths
        ]
        logits = self.hf(self.rows, use_cache=False).logits[0, -1]
        for handle in handles:
            handle.remove()
        for path in paths:
            for token in range(targets):
                found = torch.autograd.grad(
                    logits[token], [kept[path]], retain_graph=True
                )
                (found[0] * kept[path].detach()).sum()

    # --- targets in batches ---

    def batches(self) -> dict[str, Any]:
        sites = list(self.paths.values())
        trace = capture(self.model, self.rows, sites)
        ratios, times = [], []
        count = min(32, self.targets)
        for _ in range(max(2, self.rounds // 2)):
            one = cpu(lambda: self.read(trace, count, 1))
            batched = cpu(lambda: self.read(trace, count, 32))
            ratios.append(one / batched)
            times.append((one, batched))
        one, batched = (statistics.median(t) for t in zip(*times, strict=True))
        return {
            f"{count} targets, one backward each": f"{one:.2f} s",
            f"{count} targets, one batched backward": f"{batched:.2f} s",
            "sequential / batched (the page: 1.7-4.3x)": _spread(ratios),
        }

    def read(self, trace: Any, count: int, size: int) -> None:
        sites = list(self.paths.values())
        read(trace, self.seeds(count), sites, None, target_batch_size=size)

    # --- captures ---

    def captures(self) -> dict[str, Any]:
        legs: dict[str, Callable[[], Any]] = {
            "Hugging Face forward, no gradient": self.forward,
            "Hugging Face forward with a graph": self.forward_with_graph,
            "the bridge's forward with a graph": self.bridge_forward,
            "capture, save=[]": lambda: capture(self.model, self.rows, []),
            'capture, save="all"': lambda: capture(self.model, self.rows, "all"),
        }
        times: dict[str, list[float]] = {name: [] for name in legs}
        for work in legs.values():
            work()
        for _ in range(4 * self.rounds):
            for name, work in legs.items():
                times[name].append(cpu(work))
        found = {n: f"{statistics.median(t) * 1000:.1f} ms" for n, t in times.items()}
        nothing, every = times["capture, save=[]"], times['capture, save="all"']
        for name in list(legs)[:3]:
            pairs = zip(nothing, times[name], strict=True)
            found[f"capture save=[] / {name}"] = _spread([a / b for a, b in pairs])
        pairs = zip(every, nothing, strict=True)
        found['capture save="all" / save=[]'] = _spread([a / b for a, b in pairs])
        return found

    def forward(self) -> None:
        with torch.no_grad():
            self.hf(self.rows, use_cache=False)

    def forward_with_graph(self) -> None:
        self.hf(self.rows, use_cache=False)

    def bridge_forward(self) -> None:
        self.model.run(self.model.batch(self.rows.tolist()), grad=True)


def _spread(ratios: list[float]) -> str:
    low, high = min(ratios), max(ratios)
    return f"{statistics.median(ratios):.2f}x (from {low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
