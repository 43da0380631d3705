"""Methods and reductions of a read: from gradients and values to one number a site.

Sums run in float64 whatever the model's dtype. Knows neither graphs nor tables.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from torch import Tensor

from circuitlab.errors import ReadError

Method = Literal["activation_x_grad", "grad", "activation"]
Reduction = Literal["sum", "mean", "sum_of_abs", "abs_of_sum", "l2", "max_abs"]
METHODS = get_args(Method)
REDUCTIONS = get_args(Reduction)


def check_choice(name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise ReadError `read_option_invalid` unless the value is one of the closed set."""
    if value not in allowed:
        raise ReadError(
            "read_option_invalid",
            f"{name} is {value!r}; write one of {', '.join(map(str, allowed))}",
            option=name,
            value=value if isinstance(value, str | int | float) else repr(value),
            expected=list(allowed),
        )


def reduced(
    values: Tensor, reduction: Reduction, mask: Tensor | None, examples: int | None
) -> Tensor:
    """Reduce `[target, *site]` to `[target, example]`, float64 on the CPU.

    Over every selected element (`mask` bool `[*site]`) of each example, or with
    `examples=None` of the whole batch, giving `[target, 1]`.
    """
    rows = examples or 1
    flat = values.reshape(len(values), rows, -1)
    count: Any = flat.shape[-1]
    if mask is not None:
        keep = mask.reshape(rows, -1)
        flat = flat.masked_fill(~keep, 0)
        count = keep.sum(-1)
    match reduction:
        case "sum":
            found = _sum(flat)
        case "mean":
            found = _sum(flat) / count
        case "sum_of_abs":
            found = _sum(flat.abs())
        case "abs_of_sum":
            found = _sum(flat).abs()
        case "l2":
            found = torch.linalg.vector_norm(flat, dim=-1, dtype=torch.float64)
        case _:
            found = flat.abs().amax(-1).double()
    return found.cpu()


def _sum(values: Tensor) -> Tensor:
    return values.sum(-1, dtype=torch.float64)
