"""Find a bridge's senders and receivers, and prove them on one small forward.

A bridge's names are a claim. Before a model is used, every site must fire with the
shape it should have, an edit there must change the logits, and the senders of each
receiver must sum to its input. A model that fails is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from circuitlab.backends import LayerSites, Site, Tap, TokenBatch
from circuitlab.backends.capability_probe import capabilities
from circuitlab.backends.transformer_lens import TransformerLensModel, norm_of
from circuitlab.errors import ModelError
from circuitlab.sites import ModelShape

PROBE_LENGTH = 6
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


def dissect(bridge: Any, **about: Any) -> TransformerLensModel:
    """Build the backend for a bridge, or refuse it with `architecture_unsupported`
    or `model_probe_failed`."""
    _require_decoder(bridge)
    blocks = [bridge.blocks[i] for i in range(len(bridge.blocks))]
    shape = _shape(bridge, blocks)
    layers = tuple(_layer_sites(i, block, shape) for i, block in enumerate(blocks))
    model = TransformerLensModel(bridge, shape, layers, **about)
    return probe(model)


def _require_decoder(bridge: Any) -> None:
    reason = None
    if not hasattr(bridge, "blocks") or len(bridge.blocks) == 0:
        reason = "it has no stack of decoder blocks"
    elif hasattr(bridge, "encoder_blocks") or hasattr(bridge, "decoder_blocks"):
        reason = "it is an encoder-decoder"
    elif not hasattr(bridge, "ln_final") or not hasattr(bridge, "unembed"):
        reason = "it has no final norm and unembedding"
    else:
        reason = _block_reason(bridge)
    if reason:
        raise _unsupported(bridge, reason)


def _block_reason(bridge: Any) -> str | None:
    for i, block in enumerate(bridge.blocks):
        parts = block.submodules
        if "attn" not in parts or getattr(block, "attn", None) is None:
            return (
                f"block {i} has no attention ({', '.join(parts)}): a state-space mixer"
            )
        missing = [p for p in "qkvo" if p not in block.attn.submodules]
        if missing:
            return f"block {i}'s attention has no {', '.join(missing)} projection"
        mixers = {"linear_attn", "mamba", "mixer", "ssm"} & set(parts)
        if mixers:
            return f"block {i} has a state-space mixer ({', '.join(sorted(mixers))})"
    return None


def _unsupported(bridge: Any, reason: str) -> ModelError:
    name = str(bridge.cfg.architecture)
    return ModelError(
        "architecture_unsupported",
        f"{name} can't be decomposed into heads and MLPs: {reason}",
        architecture=name,
        reason=reason,
    )


def _shape(bridge: Any, blocks: Sequence[Any]) -> ModelShape:
    cfg = bridge.cfg
    n_heads = int(cfg.n_heads)
    n_kv = int(getattr(cfg, "n_key_value_heads", None) or n_heads)
    return ModelShape(
        n_layers=len(blocks),
        n_heads=n_heads,
        n_kv_heads=n_kv,
        d_model=int(cfg.d_model),
        d_head=int(cfg.d_head),
        d_vocab=int(cfg.d_vocab),
        parallel=type(blocks[0]).__name__.startswith("Parallel"),
        has_mlp="mlp" in blocks[0].submodules,
        split_heads=_splits(blocks[0]),
    )


def _splits(block: Any) -> bool:
    """Heads add up under a post-norm only if it neither centres nor shifts, and only
    if no bias takes a share of its scale."""
    if "ln1_post" not in block.submodules:
        return True
    bias = getattr(block.attn.o.original_component, "bias", None)
    return norm_of(block.ln1_post).kind == "rms" and bias is None


def _layer_sites(layer: int, block: Any, shape: ModelShape) -> LayerSites:
    at = f"blocks.{layer}"
    parts = block.submodules
    attention_norm = f"{at}.ln1" if "ln1" in parts else f"{at}.attn.q"
    mlp_norm = None
    if shape.has_mlp:
        shared = shape.parallel and "ln1" in parts
        mlp_norm = f"{at}.ln2" if "ln2" in parts else f"{at}.ln1" if shared else None
        mlp_norm = mlp_norm or _mlp_in(at, block.mlp).path
    return LayerSites(
        attention_stream=Site(attention_norm, "in"),
        q=Site(f"{at}.attn.q"),
        k=Site(f"{at}.attn.k"),
        v=Site(f"{at}.attn.v"),
        z=Site(f"{at}.attn.o", "in"),
        attention_out=Site(f"{at}.attn.o"),
        attention_post=f"{at}.ln1_post" if "ln1_post" in parts else None,
        mlp_stream=Site(mlp_norm, "in") if mlp_norm else None,
        mlp_in=_mlp_in(at, block.mlp) if shape.has_mlp else None,
        mlp_out=_mlp_out(at, parts, block.mlp) if shape.has_mlp else None,
        mlp_apart=shape.has_mlp and not _mlp_is_mixed(block.mlp),
    )


def _mlp_in(at: str, mlp: Any) -> Site:
    # OPT's MLP has no module of its own, only its two projections.
    return Site(f"{at}.mlp" if mlp.name else f"{at}.mlp.in", "in")


def _mlp_out(at: str, parts: Any, mlp: Any) -> Site:
    if "ln2_post" in parts:
        return Site(f"{at}.ln2_post")
    return Site(f"{at}.mlp.out" if _mlp_is_mixed(mlp) else f"{at}.mlp")


def _mlp_is_mixed(mlp: Any) -> bool:
    """Whether what an MLP writes is its last projection's output: OPT's is no module of
    its own, and Bloom's adds the residual inside."""
    return mlp.name is None or type(mlp).__name__ == "BloomMLPBridge"


@dataclass(frozen=True)
class _Seen:
    """What one probe forward showed: tensors by site, and each block's output type."""

    values: dict[Site, Tensor]
    tuples: bool
    logits: Tensor


def probe(model: TransformerLensModel) -> TransformerLensModel:
    """Check every site on one small forward; return the model, or raise
    `model_probe_failed` naming the site and the numbers."""
    with torch.no_grad():
        return _probe(model)


def _probe(model: TransformerLensModel) -> TransformerLensModel:
    generator = torch.Generator().manual_seed(0)
    high = min(model.shape.d_vocab, 1000)
    tokens = torch.randint(1, high, (2, PROBE_LENGTH), generator=generator)
    batch = model.batch(tokens.tolist())
    seen = _look(model, batch)
    _check_shapes(model, seen)
    _check_norms(model, seen)
    _check_sums(model, seen)
    model.blocks_return_tuples = seen.tuples
    _check_edits(model, batch, seen)
    model.capabilities = capabilities(model, batch, seen.logits)
    return model


def _sites(layer: LayerSites) -> list[Site]:
    found = [getattr(layer, name) for name in layer.__dataclass_fields__]
    return [site for site in found if isinstance(site, Site)]


def _look(model: TransformerLensModel, batch: TokenBatch) -> _Seen:
    values: dict[Site, Tensor] = {}
    counts: dict[Site, int] = {}
    wanted = [site for layer in model.layers for site in _sites(layer)]
    wanted += [model.stream, model.final_stream, model.final_out]
    wanted += [Site(f"blocks.{i}.attn.q", "in") for i in range(len(model.layers))]
    posts = [layer.attention_post for layer in model.layers]
    wanted += [Site(path) for path in posts if path]

    def keep(site: Site):
        def fn(value: Tensor) -> None:
            values[site] = value.detach().clone()
            counts[site] = counts.get(site, 0) + 1

        return fn

    tuples: list[bool] = []
    block = model.module("blocks.0")
    handle = block.register_forward_hook(
        lambda _m, _a, out: tuples.append(isinstance(out, tuple))
    )
    try:
        taps = [Tap(site, keep(site)) for site in dict.fromkeys(wanted)]
        logits = model.run(batch, taps, fast_norms=False)
    except RuntimeError as error:
        raise ModelError(
            "model_forward_failed",
            f"{model.bridge.cfg.architecture} in {model.dtype} can't run through its "
            f"TransformerLens bridge: {str(error).splitlines()[0]}; try float32",
            dtype=str(model.dtype),
        ) from error
    finally:
        handle.remove()
    for site in wanted:
        if counts.get(site) != 1:
            raise _failed(model, site, "fires once", f"{counts.get(site, 0)} times")
    return _Seen(values, tuples[0], logits)


def _failed(model: TransformerLensModel, site: Site, expected: str, found: object):
    return ModelError(
        "model_probe_failed",
        f"{model.bridge.cfg.architecture}: at {site.path} ({site.slot}) expected "
        f"{expected}, found {found}; circuitlab would give wrong numbers on this model",
        site=site.key,
        expected=expected,
        found=str(found),
    )


def _check_shapes(model: TransformerLensModel, seen: _Seen) -> None:
    shape = model.shape
    widths = {
        "q": shape.n_heads * shape.d_head,
        "k": shape.n_kv_heads * shape.d_head,
        "v": shape.n_kv_heads * shape.d_head,
        "z": shape.n_heads * shape.d_head,
    }
    for layer in model.layers:
        for site in _sites(layer):
            name = next(
                n for n in layer.__dataclass_fields__ if getattr(layer, n) == site
            )
            expected = (2, PROBE_LENGTH, widths.get(name, shape.d_model))
            found = tuple(seen.values[site].shape)
            if found != expected:
                raise _failed(model, site, f"shape {expected}", found)


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp_min(1e-12)
    return float((found - expected).abs().max() / scale)


def _tolerance(model: TransformerLensModel) -> float:
    return TOLERANCE.get(model.dtype, 0.1)


def _check_norms(model: TransformerLensModel, seen: _Seen) -> None:
    """The norms' closed form gives what the model's own modules give."""
    for i, layer in enumerate(model.layers):
        into_q = Site(f"blocks.{i}.attn.q", "in")
        pairs = [(layer.attention_stream, into_q, "attention")]
        if layer.mlp_stream and layer.mlp_in:
            pairs.append((layer.mlp_stream, layer.mlp_in, "mlp"))
        for stream, after, reader in pairs:
            ours = model.norm(i, reader)(seen.values[stream])  # type: ignore[arg-type]
            error = _error(ours, seen.values[after])
            if error > _tolerance(model):
                raise _failed(
                    model, after, "the norm's closed form", f"off by {error:.2g}"
                )
    ours = model.final_norm()(seen.values[model.final_stream])
    error = _error(ours, seen.values[model.final_out])
    if error > _tolerance(model):
        raise _failed(model, model.final_out, "the norm's closed form", f"{error:.2g}")


def _check_sums(model: TransformerLensModel, seen: _Seen) -> None:
    """The senders of each receiver, and the biases, sum to its input."""
    total = seen.values[model.stream].clone()
    for i, layer in enumerate(model.layers):
        before = total
        _check_sum(model, layer.attention_stream, seen, total)
        total = total + _attention_writes(model, i, seen)
        if layer.mlp_stream and layer.mlp_out:
            reads = before if model.shape.parallel else total
            _check_sum(model, layer.mlp_stream, seen, reads)
            total = total + model.mlp_scale(i) * seen.values[layer.mlp_out]
    _check_sum(model, model.final_stream, seen, total)


def _attention_writes(model: TransformerLensModel, i: int, seen: _Seen) -> Tensor:
    layer = model.layers[i]
    if not model.shape.split_heads:
        assert layer.attention_post is not None
        return seen.values[Site(layer.attention_post)]
    weight, bias = model.output_projection(i)
    z = seen.values[layer.z].unflatten(-1, (model.shape.n_heads, -1))
    heads = torch.einsum("bshk,hkd->bsd", z, weight)
    heads = heads if bias is None else heads + bias
    r = model.post_scale(i, seen.values[layer.attention_out])
    return heads if r is None else heads * r


def _check_sum(model: TransformerLensModel, site: Site, seen: _Seen, total: Tensor):
    error = _error(total, seen.values[site])
    if error > _tolerance(model):
        raise _failed(model, site, "the sum of its senders", f"off by {error:.2g}")


def _check_edits(model: TransformerLensModel, batch: TokenBatch, seen: _Seen) -> None:
    """An edit at each receiver and sender changes the logits."""
    generator = torch.Generator().manual_seed(1)
    plain = model.run(batch)
    for layer in sorted({0, len(model.layers) - 1}):
        for site in _acting(model, layer, seen):
            value = seen.values[site]
            noise = torch.randn(value.shape, generator=generator)
            size = value.std() or seen.values[model.stream].std()
            noise = noise.to(value) * size
            logits = model.run(batch, [Tap(site, lambda x, n=noise: x + n)])
            if _error(logits, plain) < 1e-7:
                raise _failed(
                    model, site, "an edit that changes the logits", "no change"
                )


def _acting(model: TransformerLensModel, layer: int, seen: _Seen) -> list[Site]:
    """A layer's sites where an edit must act: not those of pruned components, which
    write nothing whatever they read."""
    sites = model.layers[layer]
    found = [sites.mlp_out] if sites.mlp_out else []
    if sites.mlp_in and sites.mlp_out:
        written = seen.values[sites.mlp_out]
        if bool((written != written[0, 0]).any()):
            found.append(sites.mlp_in)
    weight, _ = model.output_projection(layer)
    if bool(weight.any()):
        found += [sites.q, sites.k, sites.v, sites.z]
    return found
