"""Ablations: what fills a cut edge, against means and donors worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import family_model, hf_model, token_prompts
from plain_models import plain
from torch import Tensor

from circuitlab.ablations import (
    AblationSource,
    Mean,
    Patch,
    Resample,
    Zero,
    as_ablation,
    describe,
)
from circuitlab.backends import Backend, load_model
from circuitlab.errors import ArgumentError, DataError
from circuitlab.metrics import answer_logprob, logit_diff
from circuitlab.prompts import Prompts
from circuitlab.senders import expand

FAMILIES = ("gpt2", "llama", "neox_parallel")


def uneven(n: int = 6) -> Prompts:
    """Pairs of different lengths in one set; the two of a pair agree."""
    sets = [token_prompts(n=1, length=4 + i % 3, seed=i) for i in range(n)]
    columns = [
        [getattr(one, name)[0] for one in sets]
        for name in ("clean", "corrupted", "answers", "wrong_answers")
    ]
    return Prompts.from_tokens(*columns)


def contributions(source: Any, rows: Any) -> list[dict[str, Tensor]]:
    """What every sender adds, row by row, without padding: `[pos, d_model]`."""
    rig, found = plain(source), []
    with torch.no_grad():
        for row in rows:
            rig.run(torch.tensor([row]))
            found.append({name: value[0] for name, value in rig.senders.items()})
    return found


def ablated(model: Backend, prompts: Prompts, ablation: Any) -> Tensor:
    """`[sender, example, pos, d_model]`."""
    source = AblationSource(model, prompts, ablation, logit_diff())
    values = source.rows(slice(0, len(prompts))).ablated
    assert values is not None
    return expand(model, values, 0, len(model.shape.senders))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("reference", [False, True])
def test_means_are_over_real_tokens_of_the_reference(family: str, reference: bool):
    source = hf_model(family)
    model, prompts, other = load_model(source), uneven(), uneven(4)
    given = other if reference else None
    pool = contributions(source, other.clean if reference else prompts.corrupted)
    flat, positional = (
        ablated(model, prompts, Mean(given, positional=p)) for p in (False, True)
    )
    for s, sender in enumerate(model.shape.senders):
        values = [row[sender.name] for row in pool]
        everywhere = torch.cat(values).mean(0)
        assert torch.allclose(flat[s], everywhere.expand_as(flat[s]), atol=1e-10)
        for pos in range(6):
            here = torch.stack([v[pos] for v in values if len(v) > pos]).mean(0)
            expected = here.expand(len(prompts), -1)
            assert torch.allclose(positional[s][:, pos], expected, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_patching_takes_the_corrupted_runs_values(family: str):
    source = hf_model(family)
    model, prompts = load_model(source), uneven()
    found = ablated(model, prompts, Patch())
    for i, row in enumerate(contributions(source, prompts.corrupted)):
        for s, sender in enumerate(model.shape.senders):
            value = row[sender.name]
            assert torch.allclose(found[s, i, : len(value)], value, atol=1e-10)


def test_donors_have_the_same_length_and_are_never_the_example_itself():
    model, prompts = family_model("gpt2"), uneven(9)
    source = AblationSource(model, prompts, Resample(seed=1), logit_diff())
    donors = source.record["donors"]
    for i, donor in enumerate(donors):
        assert donor != i
        assert len(prompts.clean[i]) == len(prompts.corrupted[donor])
    again = AblationSource(model, prompts, Resample(seed=1), logit_diff())
    assert again.record == source.record
    reference = AblationSource(model, prompts, Resample(prompts), logit_diff())
    values = reference.rows(slice(0, 9)).donors
    assert values is not None
    for i, donor in enumerate(reference.record["donors"]):
        row = values.tokens[i, : len(prompts.clean[donor])]
        assert row.tolist() == list(prompts.clean[donor])


def test_a_single_example_has_no_donor():
    model, prompts = family_model("gpt2"), token_prompts(n=1)
    with pytest.raises(ArgumentError) as caught:
        AblationSource(model, prompts, Resample(), logit_diff())
    assert caught.value.code == "resample_donor_missing"
    AblationSource(model, prompts, Resample(prompts), logit_diff())


def test_chunks_have_the_same_values_as_the_whole():
    model, prompts = family_model("llama"), uneven()
    for ablation in (Patch(), Mean(), Mean(positional=True), Resample()):
        source = AblationSource(model, prompts, ablation, logit_diff())
        whole = source.rows(slice(0, 6)).ablated
        assert whole is not None
        for rows in source.chunks(4):
            assert rows.ablated is not None
            length = rows.clean.tokens.shape[1]
            mask = rows.clean.mask[..., None]
            expected = whole.mlps[1][rows.start : rows.start + 4, :length]
            found = rows.ablated.mlps[1]
            assert torch.allclose(found * mask, expected * mask, atol=1e-12)
            assert rows.clean.numbers == tuple(
                range(rows.start, rows.start + len(rows.clean))
            )
    zero = AblationSource(model, prompts, Zero(), logit_diff())
    assert zero.rows(slice(0, 2)).ablated is None


def test_a_mean_has_no_value_where_the_reference_is_too_short():
    model, prompts = family_model("gpt2"), token_prompts(length=7)
    short = token_prompts(length=5)
    with pytest.raises(ArgumentError) as caught:
        ablated(model, prompts, Mean(short, positional=True))
    assert caught.value.code == "mean_positions_missing"
    assert ablated(model, prompts, Mean(short)).shape[2] == 7


def test_half_precision_means_count_all_tokens():
    """bfloat16 can't count past 256: 256 + 1 is 256."""
    prompts = token_prompts(n=80, length=8)
    exact = ablated(family_model("gpt2"), prompts, Mean())
    rough = ablated(family_model("gpt2", torch.bfloat16), prompts, Mean())
    error = (rough.double() - exact).abs().max() / exact.abs().max()
    assert error < 0.02


@pytest.mark.parametrize("positional", [False, True])
def test_means_cover_the_answers_that_rows_carry(positional: bool):
    model, some = family_model("gpt2"), token_prompts(n=3)
    answers = [[[1, 2]], [[3, 4, 5]], [[6]]]
    prompts = Prompts.from_tokens(some.clean, some.corrupted, answers)
    source = AblationSource(
        model, prompts, Mean(positional=positional), answer_logprob()
    )
    rows = source.rows(slice(0, 3))
    assert rows.ablated is not None
    assert rows.ablated.stream.shape[1] == rows.clean.tokens.shape[1] == 9


def test_tokens_outside_the_vocabulary_name_the_example():
    model = family_model("gpt2")
    good = [[1, 2, 3]] * 4
    prompts = Prompts.from_tokens([*good, [1, 61, 2]], [[1, 2, 3]] * 5)
    source = AblationSource(model, prompts, Zero(), logit_diff())
    with pytest.raises(DataError) as caught:
        list(source.chunks(2))
    assert caught.value.code == "token_outside_vocabulary"
    assert caught.value.fields["row"] == 4
    assert "example 4" in str(caught.value)


def test_names_are_spellings_of_the_defaults():
    spelled = {
        "patch": Patch(),
        "zero": Zero(),
        "mean": Mean(),
        "mean_positional": Mean(positional=True),
        "resample": Resample(),
    }
    for name, value in spelled.items():
        assert as_ablation(name) == value
        assert describe(value)["name"] == name
    prompts = token_prompts()
    assert describe(Mean(prompts))["reference"] == prompts.digest
    assert describe(Resample(seed=1)) != describe(Resample(seed=2))
    for wrong in ("noise", 3, None, Patch):
        with pytest.raises(ArgumentError) as caught:
            as_ablation(wrong)  # type: ignore[arg-type]
        assert caught.value.code == "ablation_unknown"
