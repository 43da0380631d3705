"""Attribution methods as values: at which points the gradient is taken.

Every method is a list of stages; a stage interpolates one component (or sender group)
between its ablated and its clean value, and says which senders its gradients credit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from circuitlab.errors import ArgumentError, require_type
from circuitlab.sites import ModelShape

if TYPE_CHECKING:
    from circuitlab.metrics import Metric

Rule = Literal["midpoint", "left", "right", "trapezoid", "gauss_legendre"]
Path = Literal["inputs", "activations", "activations_all_groups"]
Points = list[tuple[float, float]]

RULES = ("midpoint", "left", "right", "trapezoid", "gauss_legendre")
PATHS = ("inputs", "activations", "activations_all_groups")


@dataclass(frozen=True)
class Stage:
    """Gradients along one path.

    `kind` is what is interpolated: `input`, a layer's `head` senders together, or its
    `mlp`. `points` are (α, weight) pairs: α = 1 is clean, 0 ablated. Senders `first` to
    `stop` − 1 are credited.
    """

    points: Points
    first: int
    stop: int
    kind: str = "input"
    layer: int | None = None


@dataclass(frozen=True)
class EAP:
    """Edge attribution patching: the gradient at the clean run (Syed et al. 2023).

    `qk_correction` recomputes attention patterns for edges into queries and keys, as
    AtP* does, where a saturated softmax hides them from the gradient; see `qk.py`.
    """

    qk_correction: bool = False
    name: ClassVar[str] = "eap"

    def stages(self, shape: ModelShape) -> list[Stage]:
        return [Stage([(1.0, 1.0)], 0, len(shape.senders))]


@dataclass(frozen=True)
class CleanCorrupted:
    """The gradients of the clean and the corrupted run, averaged."""

    name: ClassVar[str] = "clean_corrupted"

    def stages(self, shape: ModelShape) -> list[Stage]:
        return [Stage([(1.0, 0.5), (0.0, 0.5)], 0, len(shape.senders))]


@dataclass(frozen=True)
class EAPIG:
    """EAP with integrated gradients (Hanna et al. 2024).

    `path="inputs"` averages gradients over points `ablated + α(clean − ablated)` of the
    `input` component; sender differences stay the end points'. `path="activations"`
    interpolates one sender group alone and credits only the edges that leave it;
    `"activations_all_groups"` credits every edge with every group's gradients, which is
    what EAP-IG's own code does. `rule="left"` with 5 steps is EAP-IG's for inputs,
    `rule="right"` its for activations.
    """

    steps: int = 5
    rule: Rule = "midpoint"
    path: Path = "inputs"
    name: ClassVar[str] = "eap_ig"

    def __post_init__(self):
        _one_of("ig_rule_unknown", "rule", self.rule, RULES)
        _one_of("ig_path_unknown", "path", self.path, PATHS)
        least = 2 if self.rule == "trapezoid" else 1
        whole = isinstance(self.steps, int) and not isinstance(self.steps, bool)
        if not whole or self.steps < least:
            raise ArgumentError(
                "ig_steps_out_of_range",
                f"steps is {self.steps!r}; {self.rule} needs a whole number from {least}",
                value=self.steps,
                expected=f">= {least}",
            )

    def points(self) -> Points:
        """(α, weight) pairs of the rule; weights sum to 1."""
        steps = self.steps
        weights = [1 / steps] * steps
        match self.rule:
            case "left":
                alphas = [k / steps for k in range(steps)]
            case "right":
                alphas = [(k + 1) / steps for k in range(steps)]
            case "midpoint":
                alphas = [(k + 0.5) / steps for k in range(steps)]
            case "trapezoid":
                alphas = np.linspace(0, 1, steps).tolist()
                weights = [1 / (steps - 1)] * steps
                weights[0] = weights[-1] = weights[0] / 2
            case _:
                nodes, found = np.polynomial.legendre.leggauss(steps)
                alphas, weights = ((nodes + 1) / 2).tolist(), (found / 2).tolist()
        return list(zip(alphas, weights, strict=True))

    def stages(self, shape: ModelShape) -> list[Stage]:
        points, everyone = self.points(), len(shape.senders)
        if self.path == "inputs":
            return [Stage(points, 0, everyone)]
        groups = _sender_groups(shape)
        if self.path == "activations":
            return [Stage(points, *span, kind, at) for kind, at, span in groups]
        shared = [(alpha, weight / len(groups)) for alpha, weight in points]
        return [Stage(shared, 0, everyone, kind, at) for kind, at, _ in groups]


@dataclass(frozen=True)
class Exact:
    """Every edge patched for real: M(edge corrupted) − M(clean), the same sign as a
    score. `edges` names a subset; None means all of them."""

    edges: tuple[str, ...] | None = None
    name: ClassVar[str] = "exact"


Method = EAP | EAPIG | CleanCorrupted | Exact


def check_method(method: object, metric: Metric) -> None:
    """Raise ArgumentError `method_unknown` for anything but a method, such as a name,
    and `metric_stationary_at_clean` for one that would score everything zero."""
    remedy = "write EAP(), EAPIG(steps=5), CleanCorrupted() or Exact()"
    require_type("method_unknown", "the method", method, Method, remedy)
    if metric.stationary_at_clean and only_at_clean(method):  # type: ignore[arg-type]
        raise ArgumentError(
            "metric_stationary_at_clean",
            f"the gradient of {metric.name} is zero at the clean run, so {method} would "
            "score everything zero; use EAP-IG, method=EAPIG(steps=5)",
            metric=metric.name,
            expected="EAPIG",
        )


def only_at_clean(method: Method) -> bool:
    """Whether the gradient is taken at the clean run and nowhere else."""
    if isinstance(method, EAPIG):
        return all(alpha == 1 for alpha, _ in method.points())
    return isinstance(method, EAP)


def describe(method: Method) -> dict[str, Any]:
    """Plain values that identify a method, for the policy digest."""
    options = {name: getattr(method, name) for name in method.__dataclass_fields__}
    if isinstance(method, Exact):
        options = {"edges": list(method.edges) if method.edges else None}
    return {"method": method.name, **({"method_options": options} if options else {})}


def _sender_groups(shape: ModelShape) -> list[tuple[str, int | None, tuple[int, int]]]:
    groups: list[tuple[str, int | None, tuple[int, int]]] = [("input", None, (0, 1))]
    for layer in range(shape.n_layers):
        for kind in ("head", "mlp") if shape.has_mlp else ("head",):
            rows = shape.rows(layer, kind)
            groups.append((kind, layer, (int(rows[0]), int(rows[-1]) + 1)))
    return groups


def _one_of(code: str, what: str, value: str, expected: tuple[str, ...]) -> None:
    if value not in expected:
        raise ArgumentError(
            code,
            f"{value!r} is no {what}; write one of {', '.join(expected)}",
            value=value,
            expected=expected,
        )
