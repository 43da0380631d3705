"""Metrics: one number per example, equal to what is written out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import family_model
from torch import Tensor

from circuitlab.ablations import token_batch
from circuitlab.backends import TokenBatch
from circuitlab.errors import ArgumentError, CircuitlabError
from circuitlab.metrics import (
    accuracy,
    answer_logprob,
    custom,
    kl,
    logit_diff,
    normalised,
    prob_diff,
    with_clean_logits,
)
from circuitlab.prompts import Prompts

VOCAB = 11


@pytest.fixture
def logits() -> Tensor:
    """`[example, pos, d_vocab]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 5, VOCAB, generator=generator, dtype=torch.float64)


def batch_of(answers: Any = None, wrong: Any = None, lasts=(4, 2, 3)) -> TokenBatch:
    """Right-padded rows whose last real tokens stand at `lasts`."""
    last = torch.tensor(lasts)
    mask = torch.arange(5) <= last[:, None]
    right = answers or [((1,),), ((2,), (3,)), ((4,),)]
    rest = wrong or [((5,), (6,)), ((7,),), ((8,),)]
    return TokenBatch(
        torch.zeros(3, 5, dtype=torch.int64), mask, last, tuple(right), tuple(rest)
    )


def test_logit_diff_compares_sets_of_different_sizes_by_logsumexp(logits: Tensor):
    batch = batch_of()
    found = logit_diff()(logits, batch)
    rows = [logits[0, 4], logits[1, 2], logits[2, 3]]
    right, wrong = [[1], [2, 3], [4]], [[5, 6], [7], [8]]
    for row, a, b, value in zip(rows, right, wrong, found, strict=True):
        expected = row[a].exp().sum().log() - row[b].exp().sum().log()
        assert value == pytest.approx(float(expected))


def test_prob_diff_and_accuracy_by_hand(logits: Tensor):
    batch = batch_of()
    rows = [logits[0, 4], logits[1, 2], logits[2, 3]]
    right, wrong = [[1], [2, 3], [4]], [[5, 6], [7], [8]]
    difference, correct = prob_diff()(logits, batch), accuracy()(logits, batch)
    for i, (row, a, b) in enumerate(zip(rows, right, wrong, strict=True)):
        p = row.softmax(-1)
        assert difference[i] == pytest.approx(float(p[a].sum() - p[b].sum()))
        assert bool(correct[i]) == bool(row[a].max() > row[b].max())


def test_kl_by_hand_whatever_positions_the_clean_logits_have(logits: Tensor):
    batch, other = batch_of(), logits.flip(2)
    rows = torch.arange(3)
    clean, now = (x[rows, batch.last].log_softmax(-1) for x in (other, logits))
    expected = (clean.exp() * (clean - now)).sum(-1)
    everywhere = custom(
        lambda x, _: x.sum((1, 2)), positions="all", higher_is_better=True
    )
    for metric in (kl(), everywhere):
        found = kl()(logits, with_clean_logits(batch, other, metric))
        assert found == pytest.approx(expected.numpy())
    same = kl()(other, with_clean_logits(batch, other, kl()))
    assert same.abs().max() < 1e-14


def test_logits_at_the_last_token_may_be_given_alone(logits: Tensor):
    batch = batch_of()
    alone = logits[torch.arange(3), batch.last]
    expected = logit_diff()(logits, batch)
    for given in (alone, alone[:, None]):
        assert torch.equal(logit_diff()(given, batch), expected)


def test_answer_logprob_is_teacher_forced():
    """Σ log p(tᵢ | prompt, t₁ … tᵢ₋₁), each from a run of its own."""
    model = family_model("gpt2")
    prompts = Prompts.from_tokens(
        [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
        [[1, 2, 3], [4, 5], [6, 7, 8, 9]],
        [[[10, 11, 12]], [[13]], [[14, 15]]],
    )
    metric = answer_logprob()
    batch = token_batch(model, prompts, metric)
    found = metric(model.run(batch), batch)
    for i in range(3):
        row, expected = list(prompts.clean[i]), 0.0
        for token in prompts.answers[i][0]:
            alone = model.batch([row])
            last = model.run(alone, positions=alone.last)[0, 0]
            expected += float(last.log_softmax(-1)[token])
            row.append(token)
        assert float(found[i]) == pytest.approx(expected, abs=1e-10)


def test_normalised_is_one_at_full_and_zero_at_ablated(logits: Tensor):
    batch = batch_of()
    raw = logit_diff()(logits, batch)
    found = normalised(logit_diff(), full=3.0, ablated=-1.0)(logits, batch)
    assert found == pytest.approx(((raw + 1) / 4).numpy())
    assert normalised(kl(), full=0.0, ablated=4.0).higher_is_better
    assert not normalised(kl(), full=4.0, ablated=0.0).higher_is_better
    with pytest.raises(ArgumentError) as caught:
        normalised(logit_diff(), full=2.0, ablated=2.0)
    assert caught.value.code == "metric_range_empty"


def test_custom_metrics_get_the_last_token_or_every_position(logits: Tensor):
    batch = batch_of()
    seen: list[tuple[int, ...]] = []

    def fn(values: Tensor, got: TokenBatch) -> Tensor:
        seen.append(tuple(values.shape))
        assert got.answers == batch.answers
        assert got.mask.shape == (3, 5)
        return values.flatten(1).sum(1)

    for positions in ("last", "all"):
        custom(fn, positions=positions, higher_is_better=True)(logits, batch)
    assert seen == [(3, VOCAB), (3, 5, VOCAB)]
    first, second = (
        custom(fn, higher_is_better=True, name=name).describe() for name in "ab"
    )
    assert first != second


@pytest.mark.parametrize(
    ("code", "metric", "answers", "wrong"),
    [
        ("answers_missing", logit_diff(), [((1,),), (), ((1,),)], None),
        ("answers_missing", prob_diff(), None, [((1,),), (), ((1,),)]),
        ("answers_missing", answer_logprob(), [((1,),), (), ((1,),)], None),
        ("answers_missing", answer_logprob(), [((1,),), ((),), ((1,),)], None),
        ("answer_not_unique", answer_logprob(), None, None),
        ("answer_not_single_token", accuracy(), [((1,),), ((1, 2),), ((1,),)], None),
        ("answer_not_single_token", logit_diff(), [((1,),), ((),), ((1,),)], None),
        ("answer_outside_vocabulary", logit_diff(), [((1,),), ((99,),), ((1,),)], None),
        ("answer_outside_vocabulary", logit_diff(), [((1,),), ((-1,),), ((1,),)], None),
        (
            "answer_outside_vocabulary",
            answer_logprob(),
            [((1,),), ((99,),), ((1,),)],
            None,
        ),
    ],
)
def test_answers_that_a_metric_cannot_read_are_refused(
    logits: Tensor, code: str, metric: Any, answers: Any, wrong: Any
):
    with pytest.raises(CircuitlabError) as caught:
        metric(logits, batch_of(answers, wrong))
    assert caught.value.code == code
    assert caught.value.fields["row"] == 1


@pytest.mark.parametrize("returned", [1.0, torch.ones(2), torch.ones(3, 1), None])
def test_a_metric_gives_one_number_per_example(logits: Tensor, returned: Any):
    metric = custom(lambda *_: returned, higher_is_better=True)
    with pytest.raises(ArgumentError) as caught:
        metric(logits, batch_of())
    assert caught.value.code == "metric_shape_invalid"


def test_custom_metrics_are_identified_by_plain_values():
    with pytest.raises(ArgumentError) as caught:
        custom(lambda x, _: x, higher_is_better=True, params={"a": torch.ones(1)})
    assert caught.value.code == "metric_params_invalid"
    with pytest.raises(ArgumentError) as caught:
        custom(lambda x, _: x, higher_is_better=True, positions="first")  # type: ignore[arg-type]
    assert caught.value.code == "metric_positions_invalid"
