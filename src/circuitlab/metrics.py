"""Metrics: values that turn logits into one number per example.

A metric is attributed (then it must be differentiable) or reported. It says whether
higher is better, and which positions of the logits it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from circuitlab.backends import TokenBatch
from circuitlab.errors import ArgumentError, DataError, require_type
from circuitlab.tables import canonical_json

MetricFn = Callable[[Tensor, TokenBatch], Tensor]


@dataclass(frozen=True)
class Metric:
    """One number per example.

    `fn(logits, batch)` gets `[example, d_vocab]` at each row's last real token
    (`positions="last"`) or `[example, pos, d_vocab]` (`"all"`) and returns `[example]`.
    `stationary_at_clean`: its gradient vanishes at the clean run, as KL's does.
    `needs_clean`: it reads `batch.clean_logits`. `appends_answers`: rows carry their
    answer's tokens after the prompt, so that later answer tokens can be read.
    """

    name: str
    fn: MetricFn = field(compare=False)
    higher_is_better: bool = True
    positions: Literal["last", "all"] = "last"
    params: Mapping[str, Any] = field(default_factory=dict)
    stationary_at_clean: bool = False
    needs_clean: bool = False
    appends_answers: bool = False

    def __call__(self, logits: Tensor, batch: TokenBatch) -> Tensor:
        """Evaluate; raises DataError `metric_not_finite` naming the row, and
        ArgumentError `metric_shape_invalid`."""
        if self.positions == "last":
            logits = at_last(logits, batch)
        values = self.fn(logits, batch)
        shape = tuple(values.shape) if isinstance(values, Tensor) else None
        if shape != (len(batch),):
            found = f"shape {shape}" if shape is not None else type(values).__name__
            raise ArgumentError(
                "metric_shape_invalid",
                f"the metric {self.name} returned {found}; a tensor with one number per "
                f"example, ({len(batch)},), was expected",
                value=found if shape is None else shape,
                expected=(len(batch),),
            )
        bad = (~torch.isfinite(values)).nonzero()
        if len(bad):
            row = batch.number(int(bad[0]))
            value = float(values.detach()[int(bad[0])])
            raise DataError(
                "metric_not_finite",
                f"the metric {self.name} is {value} on example {row}; check that "
                "example's tokens and answers",
                row=row,
                value=value,
            )
        return values

    def describe(self) -> dict[str, Any]:
        """Plain values that identify the metric, for the policy digest."""
        return {
            "name": self.name,
            "higher_is_better": self.higher_is_better,
            "positions": self.positions,
            **({"params": dict(self.params)} if self.params else {}),
        }


def check_metric(metric: object) -> None:
    """Raise ArgumentError `metric_invalid` for anything but a Metric, such as a name."""
    remedy = "write logit_diff(), kl(), custom(fn, …)"
    require_type("metric_invalid", "the metric", metric, Metric, remedy)


def at_last(logits: Tensor, batch: TokenBatch) -> Tensor:
    """Logits `[example, d_vocab]` at each row's last real token."""
    if logits.ndim == 2:
        return logits
    if logits.shape[1] == 1:
        return logits.squeeze(1)
    rows = torch.arange(len(batch), device=logits.device)
    return logits[rows, batch.last]


def with_clean_logits(batch: TokenBatch, logits: Tensor, metric: Metric) -> TokenBatch:
    """A batch that holds the clean run's logits as a metric reads them: at the last
    real token, or `[example, pos, d_vocab]` for one that reads all positions."""
    if metric.positions == "last":
        logits = at_last(logits, batch)
    return replace(batch, clean_logits=logits)


def _answer_ids(
    batch: TokenBatch, answers: Sequence, what: str, logits: Tensor
) -> Tensor:
    """Token ids `[example, answer]`, padded with −1."""
    if not answers or any(len(row) == 0 for row in answers):
        row = next((i for i, found in enumerate(answers) if not found), 0)
        raise _answers_missing(batch.number(row), what)
    for row, found in enumerate(answers):
        if any(len(answer) != 1 for answer in found):
            number = batch.number(row)
            raise DataError(
                "answer_not_single_token",
                f"example {number} has a {what} that is not one token; use "
                "answer_logprob()",
                row=number,
                value=[list(answer) for answer in found],
            )
        _require_known(batch, row, [answer[0] for answer in found], logits)
    width = max(len(row) for row in answers)
    ids = torch.full((len(answers), width), -1, dtype=torch.int64)
    for i, row in enumerate(answers):
        ids[i, : len(row)] = torch.tensor([answer[0] for answer in row])
    return ids.to(logits.device)


def _answers_missing(number: int, what: str) -> DataError:
    return DataError(
        "answers_missing",
        f"example {number} has no {what}; this metric reads it",
        row=number,
    )


def _require_known(
    batch: TokenBatch, row: int, ids: Sequence[int], logits: Tensor
) -> None:
    size = logits.shape[-1]
    outside = [token for token in ids if not 0 <= token < size]
    if outside:
        raise DataError(
            "answer_outside_vocabulary",
            f"example {batch.number(row)} has the answer token {outside[0]}, and this "
            f"model's vocabulary ends at {size - 1}",
            row=batch.number(row),
            value=outside[0],
            expected=f"0..{size - 1}",
        )


def _pick(values: Tensor, ids: Tensor, fill: float) -> Tensor:
    found = values.gather(-1, ids.clamp_min(0))
    return found.masked_fill(ids < 0, fill)


def _both(batch: TokenBatch, logits: Tensor) -> tuple[Tensor, Tensor]:
    right = _answer_ids(batch, batch.answers, "answer", logits)
    wrong = _answer_ids(batch, batch.wrong_answers, "wrong answer", logits)
    return right, wrong


def logit_diff() -> Metric:
    """Answer minus wrong answer at the last real token, in logits.

    Over answer sets: logsumexp(answers) − logsumexp(wrong answers).
    """

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        right, wrong = _both(batch, logits)
        low = -torch.inf
        answer = _pick(logits, right, low).logsumexp(-1)
        return answer - _pick(logits, wrong, low).logsumexp(-1)

    return Metric("logit_diff", fn)


def prob_diff() -> Metric:
    """Σ p(answers) − Σ p(wrong answers) at the last real token, in [−1, 1]."""

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        right, wrong = _both(batch, logits)
        probabilities = logits.softmax(-1)
        answer = _pick(probabilities, right, 0.0).sum(-1)
        return answer - _pick(probabilities, wrong, 0.0).sum(-1)

    return Metric("prob_diff", fn)


def answer_logprob() -> Metric:
    """Log-probability of the answer, in nats; one answer of any number of tokens.

    An answer of several tokens is teacher-forced: log p(t₁) + log p(t₂ | t₁) + …
    """

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        totals = []
        if not batch.answers:
            raise _answers_missing(batch.number(0), "answer")
        for row, answers in enumerate(batch.answers):
            number = batch.number(row)
            if not answers or not answers[0]:
                raise _answers_missing(number, "answer")
            if len(answers) != 1:
                raise DataError(
                    "answer_not_unique",
                    f"example {number} has {len(answers)} answers; answer_logprob reads "
                    "one",
                    row=number,
                )
            _require_known(batch, row, answers[0], logits)
            answer = torch.tensor(answers[0], device=logits.device)
            start = int(batch.last[row]) - (len(answer) - 1)
            logprobs = logits[row, start : start + len(answer)].log_softmax(-1)
            totals.append(logprobs.gather(-1, answer[:, None]).sum())
        return torch.stack(totals)

    return Metric("answer_logprob", fn, positions="all", appends_answers=True)


def kl() -> Metric:
    """KL(full model's clean run ‖ this run) at the last real token, in nats.

    Lower is better. Its gradient is zero at the clean run, so EAP refuses it.
    """

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        assert batch.clean_logits is not None
        clean = at_last(batch.clean_logits, batch).log_softmax(-1)
        return (clean.exp() * (clean - logits.log_softmax(-1))).sum(-1)

    return Metric(
        "kl", fn, higher_is_better=False, stationary_at_clean=True, needs_clean=True
    )


def accuracy() -> Metric:
    """1 where the best answer's logit is above the best wrong answer's, else 0.

    Reported, never attributed.
    """

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        right, wrong = _both(batch, logits)
        low = -torch.inf
        best = _pick(logits, right, low).amax(-1)
        return (best > _pick(logits, wrong, low).amax(-1)).to(logits.dtype)

    return Metric("accuracy", fn)


def custom(
    fn: MetricFn,
    *,
    positions: Literal["last", "all"] = "last",
    higher_is_better: bool,
    name: str | None = None,
    params: Mapping[str, Any] | None = None,
) -> Metric:
    """A metric of your own: `fn(logits, batch)` → one number per example.

    `batch` holds answers, wrong_answers, mask, last and clean_logits (shaped as the
    logits). The name and `params` (plain values) identify it in digests: give another
    name to another function. Raises ArgumentError `metric_positions_invalid`,
    `metric_params_invalid`.
    """
    if positions not in ("last", "all"):
        raise ArgumentError(
            "metric_positions_invalid",
            f"positions is 'last' or 'all', not {positions!r}",
            value=positions,
        )
    try:
        canonical_json(dict(params or {}))
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "metric_params_invalid",
            f"params identify the metric in digests, so they are plain values: {error}",
            value=repr(params)[:80],
        ) from error
    label = name or getattr(fn, "__qualname__", "custom")
    return Metric(
        f"custom:{label}",
        fn,
        higher_is_better,
        positions,
        params or {},
        needs_clean=True,
    )


def normalised(metric: Metric, *, full: float, ablated: float) -> Metric:
    """`(M − ablated) / (full − ablated)`: 1 at the full model, 0 at the ablated one.

    Raises ArgumentError `metric_range_empty` if full equals ablated.
    """
    span = full - ablated
    if span == 0:
        raise ArgumentError(
            "metric_range_empty",
            "the full and the ablated metric are equal: there is nothing to normalise by",
            full=full,
            ablated=ablated,
        )

    def fn(logits: Tensor, batch: TokenBatch) -> Tensor:
        return (metric.fn(logits, batch) - ablated) / span

    return Metric(
        f"normalised:{metric.name}",
        fn,
        higher_is_better=metric.higher_is_better == (span > 0),
        positions=metric.positions,
        params={**metric.params, "full": full, "ablated": ablated},
        stationary_at_clean=metric.stationary_at_clean,
        needs_clean=metric.needs_clean,
        appends_answers=metric.appends_answers,
    )
