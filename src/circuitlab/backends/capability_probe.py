"""What a loaded model can do, found out by running it."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from circuitlab.backends import Capability, Site, Tap, TokenBatch
from circuitlab.backends.transformer_lens import TransformerLensModel


def capabilities(
    model: TransformerLensModel, batch: TokenBatch, logits: Tensor
) -> frozenset[Capability]:
    """Run each capability once on a small batch whose plain `logits` are known."""
    checks = {
        Capability.PER_HEAD: lambda: model.shape.split_heads,
        Capability.GRADIENTS: lambda: _has_gradients(model, batch),
        Capability.ROW_BATCHING: lambda: _rows_are_apart(model, batch, logits),
        Capability.RESUME: lambda: _resumes(model, batch, logits),
        Capability.ATTENTION_PATTERN: lambda: _pattern_acts(model, batch, logits),
    }
    return frozenset(name for name, check in checks.items() if check())


def _same(found: Tensor, expected: Tensor) -> bool:
    tolerance = 1e-3 if found.dtype in (torch.float32, torch.float64) else 0.1
    error = (found - expected).abs().max()
    return bool(error <= tolerance * expected.abs().max())


def _has_gradients(model: TransformerLensModel, batch: TokenBatch) -> bool:
    if torch.is_inference_mode_enabled():
        return True  # unknown here; whoever asks for a gradient is told
    leaf = Tap(model.stream, lambda value: value.detach().requires_grad_())
    return model.run(batch, [leaf], grad=True, positions=batch.last).requires_grad


def _rows_are_apart(model: TransformerLensModel, batch: TokenBatch, logits: Tensor):
    found = model.run(batch.repeat(2))
    return _same(found, logits.repeat(2, 1, 1))


def _resumes(model: TransformerLensModel, batch: TokenBatch, logits: Tensor) -> bool:
    layer = model.shape.n_layers - 1
    seen: list[Tensor] = []
    start = Site(f"blocks.{layer}", "in")
    model.run(batch, [Tap(start, lambda value: seen.append(value.detach().clone()))])
    return _same(model.run(batch, resume=(layer, seen[0])), logits)


def _pattern_acts(model: TransformerLensModel, batch: TokenBatch, logits: Tensor):
    """The pattern's hook fires with its shape, and an edit there changes the logits."""
    size = batch.tokens.shape[1]
    shape = (len(batch), model.shape.n_heads, size, size)
    seen: list[tuple[int, ...]] = []

    def edit(value: Tensor) -> Tensor:
        seen.append(tuple(value.shape))
        return value.roll(1, -1)  # a rescaling would vanish in a post-norm

    site = Site("blocks.0.attn.hook_pattern")
    try:
        with warnings.catch_warnings():
            # Where the edit is discarded, the bridge says so; here that is the answer.
            warnings.simplefilter("ignore")
            found = model.run(batch, [Tap(site, edit)])
    except AttributeError:
        return False
    return seen == [shape] and not _same(found, logits)
