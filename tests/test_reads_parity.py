"""Reads against Captum, against plain autograd, and edge scores rebuilt from reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from captum.attr import LayerGradientXActivation
from torch import Tensor, nn

from circuitlab.backends import Backend, load_model
from circuitlab.backends.transformer_lens import StayDouble
from circuitlab.edges import EAP, edge_scores
from circuitlab.metrics import logit_diff
from circuitlab.prompts import Prompts
from circuitlab.reads import read, seed
from circuitlab.trace import Trace, capture
from tests.read_models import OTHERS, TOKENS, huggingface, model

TOKEN = 7
TARGET = seed("unembed.hook_out", index=(slice(None), -1, TOKEN))

# The Hugging Face modules whose outputs are sites, by the part of the name that varies.
GPT2 = {
    "transformer.wte": "embed.hook_out",
    "transformer.h.{}.ln_1": "blocks.{}.ln1.hook_out",
    "transformer.h.{}.attn.c_proj": "blocks.{}.attn.o.hook_out",
    "transformer.h.{}.ln_2": "blocks.{}.ln2.hook_out",
    "transformer.h.{}.mlp.c_fc": "blocks.{}.mlp.in.hook_out",
    "transformer.h.{}.mlp.c_proj": "blocks.{}.mlp.out.hook_out",
    "transformer.h.{}.mlp": "blocks.{}.mlp.hook_out",
    "transformer.h.{}": "blocks.{}.hook_out",
    "transformer.ln_f": "ln_final.hook_out",
    "lm_head": "unembed.hook_out",
}
LLAMA = {
    "model.embed_tokens": "embed.hook_out",
    "model.layers.{}.input_layernorm": "blocks.{}.ln1.hook_out",
    "model.layers.{}.self_attn.q_proj": "blocks.{}.attn.q.hook_out",
    "model.layers.{}.self_attn.k_proj": "blocks.{}.attn.k.hook_out",
    "model.layers.{}.self_attn.v_proj": "blocks.{}.attn.v.hook_out",
    "model.layers.{}.self_attn.o_proj": "blocks.{}.attn.o.hook_out",
    "model.layers.{}.post_attention_layernorm": "blocks.{}.ln2.hook_out",
    "model.layers.{}.mlp.gate_proj": "blocks.{}.mlp.gate.hook_out",
    "model.layers.{}.mlp.up_proj": "blocks.{}.mlp.in.hook_out",
    "model.layers.{}.mlp.down_proj": "blocks.{}.mlp.out.hook_out",
    "model.layers.{}.mlp": "blocks.{}.mlp.hook_out",
    "model.layers.{}": "blocks.{}.hook_out",
    "model.norm": "ln_final.hook_out",
    "lm_head": "unembed.hook_out",
}
MAPS = {"gpt2": GPT2, "llama": LLAMA}


def shared(names: Mapping[str, str], layers: int) -> dict[str, tuple[str, str]]:
    """Module path → (site, its kind: the site without its layer)."""
    found = {}
    for path, site in names.items():
        for layer in range(layers) if "{}" in path else [0]:
            found[path.format(layer)] = (site.format(layer), site)
    return found


def logits_of(hf: Any) -> Callable[[Tensor], Tensor]:
    """The target of an oracle. In float64 it too must not round to float32, as Llama's
    norms, rotations and softmax do: else two right results differ by 1e-7."""
    kept = StayDouble() if hf.dtype == torch.float64 else nullcontext()

    def target(tokens: Tensor) -> Tensor:
        with kept:
            return hf(tokens, use_cache=False).logits[:, -1, TOKEN]

    return target


def by_captum(hf: Any, tokens: Tensor, path: str) -> Tensor:
    layer = hf.get_submodule(path)
    found: Any = LayerGradientXActivation(logits_of(hf), layer).attribute(tokens)
    return found[0] if isinstance(found, tuple) else found


def by_autograd(hf: Any, tokens: Tensor, paths: list[str]) -> dict[str, Tensor]:
    """Activation × gradient of every module's output, with plain forward hooks."""
    kept: dict[str, Tensor] = {}

    def keep(path: str):
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            kept[path] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [hf.get_submodule(p).register_forward_hook(keep(p)) for p in paths]
    try:
        total = logits_of(hf)(tokens).sum()
    finally:
        for handle in handles:
            handle.remove()
    found = torch.autograd.grad(total, [kept[path] for path in paths])
    return {
        path: kept[path].detach() * gradient
        for path, gradient in zip(paths, found, strict=True)
    }


def compare(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    kinds: Mapping[str, tuple[str, str]],
    tolerance: float,
) -> None:
    """Element by element, relative to the largest of that kind of site."""
    largest: dict[str, float] = {}
    for path, value in expected.items():
        kind = kinds[path][1]
        largest[kind] = max(largest.get(kind, 0.0), float(value.abs().max()))
    for path, value in expected.items():
        site, kind = kinds[path]
        error = float((found[site].reshape(value.shape) - value).abs().max())
        assert error <= tolerance * largest[kind], (site, error / largest[kind])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)]
)
def test_reads_equal_captum_and_plain_autograd(family, dtype, tolerance):
    hf = huggingface(family, dtype)
    kinds = shared(MAPS[family], 2)
    trace = capture(load_model(hf), TOKENS)
    sites = [site for site, _ in kinds.values()]
    table = read(trace, TARGET, sites, frozen=None, reduce=None)
    found = {row.address[0]: row.value for row in table.values()}
    tokens = torch.tensor(TOKENS)
    plain = by_autograd(hf, tokens, list(kinds))
    compare(found, plain, kinds, tolerance)
    captum = {path: by_captum(hf, tokens, path) for path in kinds}
    compare(found, captum, kinds, tolerance)
    scores = read(trace, TARGET, sites, frozen=None)
    rows = {
        r.address[0]: torch.tensor(r.score, dtype=torch.float64)
        for r in scores.values()
    }
    compare(rows, {p: v.double().sum() for p, v in captum.items()}, kinds, tolerance)


def test_gpt2s_queries_keys_and_values_are_slices_of_its_joint_projection():
    hf = huggingface("gpt2")
    trace = capture(load_model(hf), TOKENS)
    expected = by_captum(hf, torch.tensor(TOKENS), "transformer.h.0.attn.c_attn")
    sites = [f"blocks.0.attn.hook_{port}" for port in "qkv"]
    table = read(trace, TARGET, sites, frozen=None, reduce=None)
    parts = [table[site].value for site in sites]
    assert torch.allclose(torch.cat(parts, -1), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.real_model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)]
)
def test_reads_equal_captum_and_plain_autograd_on_smollm2(
    smollm2: Path, dtype: torch.dtype, tolerance: float
):
    hf: Any = transformers.AutoModelForCausalLM.from_pretrained(
        smollm2, attn_implementation="eager", dtype=torch.float32
    )
    hf = hf.eval().to(dtype)
    rows = [[504, 2365, 282, 4649, 314]]
    trace = capture(load_model(hf), rows)
    kinds = shared(LLAMA, 30)
    sites = [site for site, _ in kinds.values()]
    table = read(trace, TARGET, sites, frozen=None, reduce=None)
    found = {row.address[0]: row.value for row in table.values()}
    tokens = torch.tensor(rows)
    compare(found, by_autograd(hf, tokens, list(kinds)), kinds, tolerance)
    # One call a site is slow, so Captum gets the layers at both ends.
    some = [p for p in kinds if ".layers." not in p or p.split(".")[2] in ("0", "29")]
    captum = {path: by_captum(hf, tokens, path) for path in some}
    compare(found, captum, kinds, tolerance)


# --- edge scores rebuilt from public reads ---


def senders_of(trace: Trace) -> Tensor:
    """What every sender adds to the stream, `[sender, example, pos, d_model]`."""
    found = trace.model
    rows = [trace[found.stream]]
    for i, layer in enumerate(found.layers):
        z = trace[layer.z].unflatten(-1, (found.shape.n_heads, -1))
        weight, _ = found.output_projection(i)
        rows += torch.einsum("ephd,hdm->hepm", z, weight.detach()).unbind()
        assert layer.mlp_out
        rows.append(trace[layer.mlp_out])
    return torch.stack(rows)


def receiver_gradients(trace: Trace, cotangent: Tensor) -> Tensor:
    """Gradients at every receiver's pre-norm input, `[receiver, example, pos, d_model]`.

    Two public reads deep: the metric's cotangent to every receiver group's own output,
    then each group's gradient back to the stream that it reads.
    """
    found, shape = trace.model, trace.model.shape
    groups: list[tuple[Any, Any, str, int]] = []
    for i, layer in enumerate(found.layers):
        groups += [(getattr(layer, p), layer.attention_stream, p, i) for p in "qkv"]
        groups.append((layer.mlp_in, layer.mlp_stream, "in", i))
    groups.append((found.final_out, found.final_stream, "logits", -1))
    options: dict[str, Any] = {"method": "grad", "reduce": None, "frozen": None}
    table = read(
        trace,
        seed("logits", cotangent=cotangent),
        within=[site for site, *_ in groups],
        **options,
    )
    streams = []
    for site, stream, port, layer in groups:
        gradient = table[trace.record(site).label].value
        targets = _split(gradient, port, shape)
        pulled = read(
            trace,
            [seed(site, cotangent=target) for target in targets],
            within=stream,
            **options,
        )
        values = [row.value for row in pulled.values()]
        columns = (
            [shape.receiver_index["logits"]]
            if port == "logits"
            else shape.columns(layer, port).tolist()
        )
        streams += list(zip(columns, values, strict=True))
    return torch.stack([value for _, value in sorted(streams, key=lambda p: p[0])])


def _split(gradient: Tensor, port: str, shape: Any) -> list[Tensor]:
    """One cotangent per head: the others' slices are zero."""
    if port in ("in", "logits"):
        return [gradient]
    heads = shape.n_heads if port == "q" else shape.n_kv_heads
    apart = gradient.unflatten(-1, (heads, -1))
    found = []
    for head in range(heads):
        alone = torch.zeros_like(apart)
        alone[..., head, :] = apart[..., head, :]
        found.append(alone.flatten(-2))
    return found


@pytest.mark.parametrize("family", ["gpt2", "llama", "neox"])
def test_edge_scores_are_rebuilt_from_captures_and_reads(family: str):
    found: Backend = model(family)
    prompts = Prompts.from_tokens(TOKENS, OTHERS, [3, 4, 5], [6, 7, 8])
    metric = logit_diff()
    edges = edge_scores(found, prompts, metric, method=EAP())
    save = [found.stream, "logits"]
    for layer in found.layers:
        save += [layer.z, layer.mlp_out]  # type: ignore[list-item]
    clean = capture(found, prompts, save, norms="fused")
    corrupted = capture(found, prompts, save, side="corrupted", norms="fused")
    logits = clean["logits"].requires_grad_()
    (cotangent,) = torch.autograd.grad(metric(logits, clean.batch).sum(), [logits])
    gradients = receiver_gradients(clean, cotangent)
    change = senders_of(corrupted) - senders_of(clean)
    scores = torch.einsum("uepd,vepd->uv", change, gradients) / len(TOKENS)
    rebuilt = scores.numpy()[found.shape.edge_indices]
    scale = np.abs(edges.scores).max()
    assert scale > 1e-3
    assert np.abs(rebuilt - edges.scores).max() <= 1e-10 * scale
