"""Turn a grouped-query model into an equivalent multi-head one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from circuitlab.errors import ModelError


def ungroup(model: Any) -> None:
    """Repeat every layer's key and value weights once per query head, in place.

    Logits stay equal. Raises ModelError `ungroup_unsupported` where keys and values
    have no projection of their own.
    """
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    if groups == heads:
        return
    found = 0
    for module in list(model.modules()):
        if hasattr(module, "k_proj") and hasattr(module, "v_proj"):
            keys = module.k_proj.weight.shape[0]
            _repeat_norm(getattr(module, "k_norm", None), keys, groups, heads // groups)
            module.k_proj = _repeated(module.k_proj, groups, heads // groups)
            module.v_proj = _repeated(module.v_proj, groups, heads // groups)
            found += 1
        elif hasattr(module, "qkv_proj"):
            module.qkv_proj = _repeated_joint(module.qkv_proj, groups, heads)
            found += 1
        else:
            continue
        for name in ("num_key_value_groups", "n_rep"):
            if hasattr(module, name):
                setattr(module, name, 1)
        if hasattr(module, "num_key_value_heads"):
            module.num_key_value_heads = heads
    if not found:
        raise ModelError(
            "ungroup_unsupported",
            f"{type(model).__name__} has no separate key and value projections",
            value=type(model).__name__,
        )
    config.num_key_value_heads = heads


def _repeat_norm(norm: Any, keys: int, groups: int, times: int) -> None:
    """A norm over all keys at once (OLMo 2) has a weight per key feature; its mean
    square stays what it was when every head is repeated equally often."""
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.shape == (keys,):
        norm.weight = nn.Parameter(_repeat_rows(weight.detach(), groups, times))


def _repeat_rows(value: Tensor, groups: int, times: int) -> Tensor:
    per_head = value.reshape(groups, -1, *value.shape[1:])
    return per_head.repeat_interleave(times, 0).reshape(-1, *value.shape[1:]).clone()


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    made = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        made.weight.copy_(weight)
        if bias is not None:
            made.bias.copy_(bias)
    return made


def _repeated(linear: nn.Linear, groups: int, times: int) -> nn.Linear:
    bias = linear.bias
    return _linear(
        _repeat_rows(linear.weight, groups, times),
        None if bias is None else _repeat_rows(bias, groups, times),
    )


def _repeated_joint(linear: nn.Linear, groups: int, heads: int) -> nn.Linear:
    d_head = linear.weight.shape[0] // (heads + 2 * groups)
    sizes = [heads * d_head, groups * d_head, groups * d_head]
    query, key, value = linear.weight.split(sizes)
    times = heads // groups
    parts = [query, *(_repeat_rows(part, groups, times) for part in (key, value))]
    return _linear(torch.cat(parts), None)
