"""Ablations: what fills a component's contribution where its edge is cut.

Each is a value. Their names as strings (`patch`, `zero`, `mean`, `mean_positional`,
`resample`) are spellings of the defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from circuitlab.backends import Backend, TokenBatch
from circuitlab.errors import ArgumentError, DataError, require_count
from circuitlab.metrics import Metric, check_metric
from circuitlab.prompts import Prompts, check_prompts
from circuitlab.senders import SenderValues, collect


@dataclass(frozen=True)
class Patch:
    """The value that the component has on the corrupted prompt (interchange)."""


@dataclass(frozen=True)
class Zero:
    """Zero. Attention output biases belong to no component, so they stay."""


@dataclass(frozen=True)
class Mean:
    """The component's mean over `reference` (None: the set's corrupted prompts), over
    all real positions, or per position. A given reference's clean prompts are read."""

    reference: Prompts | None = None
    positional: bool = False


@dataclass(frozen=True)
class Resample:
    """The value on another example's corrupted prompt (or a `reference`'s clean one) of
    equal length, drawn with `seed`; the donors are recorded."""

    reference: Prompts | None = None
    seed: int = 0


Ablation = Patch | Zero | Mean | Resample

NAMED: dict[str, Ablation] = {
    "patch": Patch(),
    "zero": Zero(),
    "mean": Mean(),
    "mean_positional": Mean(positional=True),
    "resample": Resample(),
}


def as_ablation(ablation: Ablation | str) -> Ablation:
    """An ablation from its name. Raises ArgumentError `ablation_unknown`."""
    if isinstance(ablation, Ablation):
        return ablation
    if not isinstance(ablation, str) or ablation not in NAMED:
        raise ArgumentError(
            "ablation_unknown",
            f"{ablation!r} is no ablation; write one of {', '.join(NAMED)}",
            value=ablation if isinstance(ablation, str) else repr(ablation),
            expected=sorted(NAMED),
        )
    return NAMED[ablation]


def describe(ablation: Ablation) -> dict[str, Any]:
    """Plain values that identify an ablation, for the policy digest."""
    match ablation:
        case Patch():
            return {"name": "patch"}
        case Zero():
            return {"name": "zero"}
        case Mean(reference, positional):
            name = "mean_positional" if positional else "mean"
            return {"name": name, "reference": reference and reference.digest}
        case Resample(reference, seed):
            reference = reference and reference.digest
            return {"name": "resample", "reference": reference, "seed": seed}


def described(record: Mapping[str, Any], known: Prompts) -> Ablation:
    """The ablation that `describe` gave `record` of, its donors left aside.

    A reference is in the record by its digest alone. Raises ArgumentError
    `ablation_reference_needed` where that is not `known`'s.
    """
    name, digest = record["name"], record.get("reference")
    if digest not in (None, known.digest):
        raise ArgumentError(
            "ablation_reference_needed",
            f"the ablation was {name} over other prompts, of which the digest is known "
            f"alone ({digest[:12]}…); give it, as in ablation=Mean(reference=prompts)",
            value=dict(record),
            expected="ablation=",
        )
    reference = None if digest is None else known
    if name == "resample":
        return Resample(reference, record["seed"])
    if name.startswith("mean"):
        return Mean(reference, positional=name == "mean_positional")
    return as_ablation(name)


@contextmanager
def _numbered(start: int) -> Iterator[None]:
    """Errors about a row of a batch name the example of the set."""
    try:
        yield
    except DataError as error:
        fields = {**error.fields}
        row = fields.pop("row", None)
        if not isinstance(row, int) or not start:
            raise
        code = str(fields.pop("code"))
        text = str(error).replace(f"row {row} ", f"example {start + row} ")
        raise DataError(code, text, row=start + row, **fields) from None


@dataclass(frozen=True)
class Rows:
    """A chunk of the prompt set: its batch, its ablated sender values, and the logits of
    the run that gave them (None where no run did)."""

    start: int
    clean: TokenBatch
    ablated: SenderValues | None
    ablated_logits: Tensor | None
    donors: TokenBatch | None

    @property
    def first_difference(self) -> int:
        """The first position where any example's donor differs: before it, a causal
        model's clean and donor runs are the same. 0 where there are no donors."""
        if self.donors is None or self.donors.tokens.shape != self.clean.tokens.shape:
            return 0
        differs = (self.donors.tokens != self.clean.tokens).any(0).nonzero()
        latest = int(self.clean.last.min())
        return min(int(differs[0]), latest) if len(differs) else latest


class AblationSource:
    """Gives the ablated values of each chunk of a prompt set.

    Set-wide means and donors are fixed at construction; `record` says which. Raises
    ArgumentError `prompts_invalid`, `metric_invalid`.
    """

    def __init__(
        self, model: Backend, prompts: Prompts, ablation: Ablation, metric: Metric
    ):
        check_prompts(prompts)
        check_metric(metric)
        self.model = model
        self.prompts = prompts
        self.ablation = ablation
        self.metric = metric
        self.record: dict[str, Any] = describe(ablation)
        self._means: SenderValues | None = None
        self._donors: tuple[tuple[int, ...], ...] | None = None
        match ablation:
            case Patch():
                prompts.require_equal_lengths()
                self._donors = prompts.corrupted
            case Resample():
                self._donors = self._draw(ablation)
            case Mean():
                self._means = self._average(ablation)

    def chunks(self, size: int) -> Iterator[Rows]:
        """The set in order, `size` examples at a time, with ablated values.

        Raises ArgumentError `batch_size_invalid`.
        """
        size = require_count("batch_size_invalid", "batch_size", size)
        for start in range(0, len(self.prompts), size):
            yield self.rows(slice(start, start + size))

    def rows(self, which: slice) -> Rows:
        """Some examples, with their ablated values (None stands for zeros)."""
        start = which.start or 0
        with _numbered(start):
            return self._rows(which, start)

    def _rows(self, which: slice, start: int) -> Rows:
        clean = token_batch(self.model, self.prompts[which], self.metric)
        clean = replace(clean, numbers=tuple(range(start, start + len(clean))))
        if self._donors is not None:
            tokens = [list(row) for row in self._donors[which]]
            extra = answer_suffixes(self.prompts[which], self.metric)
            rows = [row + list(more) for row, more in zip(tokens, extra, strict=True)]
            donors = self.model.batch(rows, clean.answers, clean.wrong_answers)
            donors = replace(donors, numbers=clean.numbers)
            positions = donors.last if self.metric.positions == "last" else None
            values, logits = collect(self.model, donors, positions)
            return Rows(start, clean, values, logits, donors)
        return Rows(start, clean, self._fitted(clean), None, None)

    def _fitted(self, batch: TokenBatch) -> SenderValues | None:
        """The set-wide means, cut to a batch's length."""
        if self._means is None:
            return None
        length = batch.tokens.shape[1]

        def fit(value: Tensor) -> Tensor:
            short = value[:, :length]
            return short.expand(len(batch), length, *value.shape[2:])

        return self._means.map(fit)

    def _draw(self, ablation: Resample) -> tuple[tuple[int, ...], ...]:
        pool = (
            ablation.reference.clean if ablation.reference else self.prompts.corrupted
        )
        generator = np.random.default_rng(ablation.seed)
        lengths = np.array([len(row) for row in pool])
        donors = []
        for i, row in enumerate(self.prompts.clean):
            fitting = np.flatnonzero(lengths == len(row))
            if ablation.reference is None:
                fitting = fitting[fitting != i]
            if len(fitting) == 0:
                raise ArgumentError(
                    "resample_donor_missing",
                    f"example {i} has {len(row)} tokens and no donor has; give a reference "
                    "with prompts of that length",
                    row=i,
                    length=len(row),
                )
            donors.append(int(generator.choice(fitting)))
        self.record["donors"] = donors
        return tuple(pool[i] for i in donors)

    def _average(self, ablation: Mean) -> SenderValues:
        pool = self._pool(ablation)
        longest = max(len(row) for row in self._with_answers(self.prompts, "clean"))
        longest = max(longest, *(len(row) for row in pool))
        if ablation.positional and longest > max(len(row) for row in pool):
            raise ArgumentError(
                "mean_positions_missing",
                "the reference has no prompt as long as the longest clean one, so there "
                "is no mean at its last positions",
                longest=longest,
            )
        totals: SenderValues | None = None
        # In float64: half precision can't even count the tokens.
        count = torch.zeros((), device=self.model.device, dtype=torch.float64)
        for start in range(0, len(pool), 32):
            batch = self.model.batch([list(row) for row in pool[start : start + 32]])
            values, _ = collect(self.model, batch, batch.last)
            part, seen = _totals(values, batch.mask, longest, ablation.positional)
            totals = part if totals is None else totals.combine(part, torch.add)
            count = count + seen
        assert totals is not None
        per_position = count.clamp_min(1)
        dtype = self.model.dtype
        return totals.map(lambda t: (t / _beside(per_position, t)).to(dtype))

    def _pool(self, ablation: Mean) -> list[list[int]]:
        """The rows that a mean is taken over, with the answers that metrics read."""
        if ablation.reference is not None:
            return self._with_answers(ablation.reference, "clean")
        return self._with_answers(self.prompts, "corrupted")

    def _with_answers(self, prompts: Prompts, which: str) -> list[list[int]]:
        extra = answer_suffixes(prompts, self.metric)
        rows = getattr(prompts, which)
        return [[*row, *more] for row, more in zip(rows, extra, strict=True)]


def _beside(count: Tensor, value: Tensor) -> Tensor:
    return count.reshape(1, -1, *[1] * (value.ndim - 2))


def _totals(values: SenderValues, mask: Tensor, longest: int, positional: bool):
    """Sums over real tokens, and their counts; one position unless positional."""
    weight = mask.double()

    def total(value: Tensor) -> Tensor:
        wide = weight.reshape(*weight.shape, *[1] * (value.ndim - 2))
        found = (value * wide).sum(0, keepdim=True)
        if not positional:
            return found.sum(1, keepdim=True).expand(1, longest, *value.shape[2:])
        short = longest - found.shape[1]
        pad = found.new_zeros(1, short, *found.shape[2:])
        return torch.cat([found, pad], 1)

    seen = weight.sum(0)
    if not positional:
        return values.map(total), seen.sum().expand(longest)
    return values.map(total), torch.nn.functional.pad(seen, (0, longest - len(seen)))


def answer_suffixes(prompts: Prompts, metric: Metric) -> list[tuple[int, ...]]:
    """The answer tokens that a row carries after its prompt (none for most metrics)."""
    if not metric.appends_answers:
        return [() for _ in range(len(prompts))]
    # The metric refuses an example without an answer, or with several.
    return [answers[0][:-1] if answers else () for answers in prompts.answers]


def token_batch(
    model: Backend, prompts: Prompts, metric: Metric, corrupted: bool = False
) -> TokenBatch:
    """The clean (or corrupted) prompts as one batch that `metric` can read."""
    rows = prompts.corrupted if corrupted else prompts.clean
    extra = answer_suffixes(prompts, metric)
    tokens = [[*row, *more] for row, more in zip(rows, extra, strict=True)]
    return model.batch(tokens, prompts.answers, prompts.wrong_answers)
