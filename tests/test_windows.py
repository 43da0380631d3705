"""Circuits computed only at the tokens that matter are the circuits computed at all."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import circuitlab as cl
from circuitlab.ablated_side import ablated_side
from circuitlab.ablations import AblationSource, Mean, Patch, Resample, Zero
from circuitlab.circuit_pass import Chunk
from circuitlab.circuit_run import run_circuits
from circuitlab.windows import Window, windows
from circuitlab.wiring import Wiring
from tests import read_models

FAMILIES = ["gpt2", "llama", "neox", "opt", "bloom", "phi", "gemma2", "olmo2"]


def prompts(
    lengths: tuple[int, ...] = (8, 6, 8), moved: tuple[int, ...] = (3, 3, 3, 3)
) -> cl.Prompts:
    """Pairs of several lengths; each differs at a position and the one after."""
    generator = torch.Generator().manual_seed(0)
    clean = [
        torch.randint(1, read_models.VOCAB, (n,), generator=generator).tolist()
        for n in lengths
    ]
    corrupted = [[*row] for row in clean]
    for row, first in zip(corrupted, moved, strict=False):
        for place in (first, first + 1):
            row[place] = row[place] % (read_models.VOCAB - 1) + 1
    firsts = [row[0] for row in clean]
    return cl.Prompts.from_tokens(clean, corrupted, firsts, [row[1] for row in clean])


def masks(model, shares=(0.02, 0.1, 0.4, 1.0)) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    edges = model.shape.edge_mask
    return [edges & (generator.random(edges.shape) < share) for share in shares]


def rows_of(model, pairs, ablation):
    source = AblationSource(model, pairs, ablation, cl.logit_diff())
    return source.rows(slice(0, len(pairs)))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ablation", [Patch(), Mean(), Zero(), Resample()])
def test_the_windows_change_no_number(family, ablation):
    model = read_models.model(family)
    rows = rows_of(model, prompts((8, 6, 8, 6)), ablation)
    side, last = ablated_side(model, rows), rows.clean.last
    assert side.first == (3 if ablation == Patch() else 0)
    whole = run_circuits(
        model, Chunk(rows.clean, replace(side, first=0), None), masks(model)
    )
    some = run_circuits(model, Chunk(rows.clean, side, None), masks(model))
    real = rows.clean.mask
    torch.testing.assert_close(some[:, real], whole[:, real], rtol=0, atol=1e-11)
    at_end = run_circuits(model, Chunk(rows.clean, side, last), masks(model))
    expected = whole[:, torch.arange(len(last)), last]
    torch.testing.assert_close(at_end[:, :, 0], expected, rtol=0, atol=1e-11)
    for row, mask in enumerate(masks(model)):
        # Alone, a circuit reaches less than together with denser ones.
        alone = run_circuits(model, Chunk(rows.clean, side, last), [mask])[0]
        torch.testing.assert_close(alone[:, 0], expected[row], rtol=0, atol=1e-11)


def test_positions_before_the_first_difference_can_be_unembedded():
    model = read_models.model("gpt2")
    rows = rows_of(model, prompts(), Patch())
    side, early = ablated_side(model, rows), torch.tensor([1, 2, 5])
    found = run_circuits(model, Chunk(rows.clean, side, early), masks(model))
    whole = run_circuits(
        model, Chunk(rows.clean, replace(side, first=0), None), masks(model)
    )
    expected = whole[:, torch.arange(3), early]
    torch.testing.assert_close(found[:, :, 0], expected, rtol=0, atol=1e-11)


def test_pairs_that_are_alike_move_nowhere():
    model = read_models.model("gpt2")
    clean = [list(row) for row in prompts((8, 8, 8)).clean]
    same = cl.Prompts.from_tokens(clean, clean, [1] * 3, [2] * 3)
    rows = rows_of(model, same, Patch())
    side, last = ablated_side(model, rows), rows.clean.last
    assert side.first == rows.clean.tokens.shape[1] - 1
    plain = model.run(rows.clean, positions=last)
    found = run_circuits(model, Chunk(rows.clean, side, last), masks(model))
    torch.testing.assert_close(found, plain.expand_as(found), rtol=0, atol=1e-11)


def test_the_first_difference_is_the_earliest_of_a_chunk():
    model = read_models.model("gpt2")
    pairs = prompts((8, 8), moved=(5, 2))
    assert rows_of(model, pairs, Patch()).first_difference == 2
    assert rows_of(model, pairs[:1], Patch()).first_difference == 5


def test_only_what_leads_to_a_key_or_value_is_computed_everywhere():
    shape = read_models.model("gpt2").shape
    wiring = Wiring(shape)
    mask = shape.mask_of({"input->m0", "m0->a1.h0<k>", "a1.h0->logits"})
    reach = wiring.reach(mask)
    assert reach.stream
    assert reach.mlps == (True, False, *reach.mlps[2:])
    assert not any(reach.mlps[2:])
    assert not any(reach.heads)
    # A query is read where its head is, and a key that no head's reader needs never.
    mask = shape.mask_of({"input->m0", "m0->a1.h0<q>", "a1.h0->logits"})
    assert not wiring.reach(mask).stream
    assert not any(wiring.reach(mask).mlps)
    mask = shape.mask_of({"input->m0", "m0->a1.h0<k>"})
    assert not any(wiring.reach(mask).mlps)
    together = Wiring(shape, coupled=True)
    assert not together.reach(mask).mlps[0]
    # Where heads are coupled, what an unread one reads moves the others.
    mask = shape.mask_of({"input->m0", "m0->a1.h0<k>", "a1.h1->logits"})
    assert together.reach(mask).mlps[0]
    assert not wiring.reach(mask).mlps[0]


@pytest.mark.parametrize("positions", [None, torch.tensor([4, 2])])
def test_what_a_window_takes_it_puts_back(positions):
    value = torch.arange(2 * 2 * 5 * 3.0).reshape(4, 5, 3)  # two copies of two rows
    for window in (windows(2, positions).every, windows(2, positions).end):
        blank = torch.zeros_like(value)
        window.put(window.take(value), blank)
        torch.testing.assert_close(window.take(blank), window.take(value))
        assert int((blank != 0).any(-1).sum()) == window.take(value)[..., 0].numel()
        columns = torch.zeros_like(value)
        window.put(window.take(value)[..., [0, 2]], columns, [0, 2])
        torch.testing.assert_close(columns[..., 2], blank[..., 2])
        assert not columns[..., 1].any()
    every, tail = windows(2, positions).every, windows(2, positions).tail
    end = windows(2, positions).end
    torch.testing.assert_close(tail.take(every.take(value)), end.take(value))
    assert Window().take(value) is not None
