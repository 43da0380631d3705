"""From reads to selections and back into reads: foreign, stale, and by element."""

from __future__ import annotations

import pytest
import torch

from circuitlab.backends import load_model
from circuitlab.circuits import threshold, top_fraction, top_k
from circuitlab.errors import ArgumentError
from circuitlab.read_table import ReadTable
from circuitlab.reads import read, seed
from circuitlab.site_selection import SiteSelection
from circuitlab.trace import Trace, capture
from tests.read_models import TOKENS, huggingface, model

LOGIT = seed("unembed.hook_out", index=(0, -1, 7))


def reason(call, *args, **options) -> object:
    with pytest.raises(ArgumentError) as found:
        call(*args, **options)
    assert found.value.code == "by_score_invalid"
    return found.value.fields["reason"]


def fresh() -> Trace:
    return capture(model(), TOKENS, backward_ready=True)


def test_a_table_ranks_until_its_trace_is_cleaned_or_run_backward():
    trace = fresh()
    table = read(trace, LOGIT, frozen=None)
    assert isinstance(top_k(table, 3), SiteSelection)
    # Reads are no backward of the user's.
    read(trace, LOGIT, frozen=None)
    assert len(top_k(k=3, by=table)) == 3
    torch.autograd.grad(
        trace["logits"].sum(), [trace["blocks.1.hook_in"]], retain_graph=True
    )
    assert reason(top_k, table, 3) == "by_table_stale"
    assert not table.rescorable
    again = read(trace, LOGIT, frozen=None)
    assert len(top_fraction(again, 0.1)) > 0
    trace.cleanup()
    assert reason(threshold, again, 0.0) == "by_table_stale"
    # A copy that was loaded stands alone.
    assert len(top_k(ReadTable.from_json(again.to_json()), 3)) == 3


def test_a_selection_is_a_population_and_a_policy():
    trace = fresh()
    best = top_k(read(trace, LOGIT, frozen=None), 4)
    table = read(trace, LOGIT, within=best, frozen=None)
    assert [a[0] for _, _, a in table] == list(best)
    frozen = read(trace, LOGIT, frozen=best)
    named = read(trace, LOGIT, frozen=list(best))
    assert [r.score for r in frozen.values()] == [r.score for r in named.values()]


def test_elements_are_selected_and_read_by_their_masks():
    trace = fresh()
    sites = ["blocks.0.hook_out", "blocks.1.mlp.hook_post"]
    dense = read(trace, LOGIT, sites, None, reduce=None)
    best = top_k(dense, 10, rank="magnitude")  # type: ignore[call-overload]
    assert len(best) == 10
    flat = torch.cat([row.value.abs().reshape(-1) for row in dense.values()])
    inside = read(trace, LOGIT, best, None, reduce="sum_of_abs")
    total = sum(row.score or 0.0 for row in inside.values())
    assert total == pytest.approx(float(flat.sort(descending=True).values[:10].sum()))
    # The same elements rank again, and nothing outside them.
    narrowed = read(trace, LOGIT, best, None, reduce=None)
    assert top_k(narrowed, 10).elements.keys() == best.elements.keys()
    with pytest.raises(ArgumentError) as found:
        top_k(narrowed, 11)
    assert found.value.code == "k_out_of_range"
    shorter = capture(model(), [[1, 2, 3]])
    assert reason(read, shorter, LOGIT, best, None) == "by_table_index_space_mismatch"


def test_selections_of_other_models_are_foreign():
    best = top_k(read(fresh(), LOGIT, frozen=None), 4)
    other = capture(load_model(huggingface("gpt2", seed=1)), TOKENS)
    assert reason(read, other, LOGIT, best, None) == "by_table_foreign"
    inner = capture(model(), TOKENS, norms="open")
    assert reason(read, inner, LOGIT, best, None) == "by_table_foreign"
    same = capture(load_model(huggingface("gpt2")), TOKENS)
    assert len(read(same, LOGIT, best, None)) == 4


def test_several_targets_are_narrowed_or_folded():
    targets = [LOGIT, seed("unembed", index=(0, -1, 8))]
    table = read(fresh(), targets, frozen=None)
    assert reason(top_k, table, 3) == "by_table_multi_target"
    assert len(top_k(table.target("t1"), 3)) == 3
    assert len(top_k(table.aggregate_targets(max), 3)) == 3
