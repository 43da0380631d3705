"""Normalisation in closed form: apply it, and pull a gradient back through it.

LayerNorm and RMSNorm are y = γ·x̂ + β with x̂ = (x − μ)·r (μ = 0 for RMSNorm) and
r = (mean((x − μ)²) + ε)^−½. Their vector-Jacobian product is

    Jᵀg = r · (γg − mean(γg) − x̂ · (x̂·γg)/d)

where the first mean is absent for RMSNorm. Nothing is frozen: this is the total
derivative. A test holds it equal to autograd on every architecture family.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Norm:
    """One norm's kind and parameters; `none` is the identity."""

    kind: Literal["layer", "rms", "none"]
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the norm over the last axis."""
        if self.kind == "none":
            return x
        size = x.shape[-1:]
        if self.kind == "layer":
            return F.layer_norm(x, size, self.weight, self.bias, self.eps)
        return F.rms_norm(x, size, self.weight, self.eps)

    def statistics(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return x̂ `[..., d]` and r `[..., 1]` at `x`."""
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        r = (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return x * r, r

    def pull(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Pull a gradient at the norm's output back to its input at `x`."""
        if self.kind == "none":
            return gradient
        normed, r = self.statistics(x)
        if self.weight is not None:
            gradient = gradient * self.weight
        if self.kind == "layer":
            gradient = gradient - gradient.mean(-1, keepdim=True)
        along = (normed * gradient).mean(-1, keepdim=True)
        return (gradient - normed * along) * r

    def fold_into(self, weight: Tensor) -> Tensor:
        """Fold γ, and LayerNorm's centring, into a projection `[..., d]` that reads it.

        With W' the result, Jᵀ(Wᵀq) = r·(W'ᵀq) − r·x̂·(x̂·W'ᵀq)/d, so that only the
        last, rank-one term is left to compute per token.
        """
        if self.kind == "none":
            return weight
        folded = weight.clone() if self.weight is None else weight * self.weight
        if self.kind == "layer":
            folded.sub_(folded.mean(-1, keepdim=True))
        return folded

    def constant_through(self, weight: Tensor) -> Tensor:
        """W·β: what the norm's bias adds to a projection's output."""
        if self.bias is None:
            return weight.new_zeros(weight.shape[:-1])
        return weight @ self.bias
