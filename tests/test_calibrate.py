"""Calibration: what the statistics mean, and that they come from exact effects."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import circuitlab as cl
from circuitlab.ablations import Mean, Resample, describe
from circuitlab.calibrate import (
    bootstrapped,
    calibrate,
    proportion,
    recall_at,
    sign_agreement,
    spearman,
)
from circuitlab.errors import CircuitlabError
from circuitlab.exact import exact_effects
from circuitlab.store import Store
from circuitlab.tables import EVAL
from tests.families import family_model, token_prompts
from tests.test_exact import golden_model


@pytest.fixture(scope="module")
def toy():
    model, prompts, _ = golden_model()
    scores = cl.edge_scores(model, prompts, cl.logit_diff(), method=cl.EAPIG(3))
    return model, prompts, scores


def test_spearman_correlates_ranks_with_ties_too():
    generator = np.random.default_rng(0)
    for _ in range(20):
        x = generator.integers(0, 6, 25).astype(float)
        y = x + generator.normal(0, 2, 25).round()
        ranks = pd.Series(x).rank().corr(pd.Series(y).rank())
        assert spearman(x, y) == pytest.approx(ranks)
    assert math.isnan(spearman(np.ones(4), np.arange(4.0)))


def test_sign_agreement_leaves_out_edges_without_effect():
    assert sign_agreement(np.array([1.0, -1, 2]), np.array([2.0, 3, 0])) == 0.5
    assert math.isnan(sign_agreement(np.ones(2), np.zeros(2)))


def test_proportions_have_wilson_intervals():
    found = proportion(0.8, 50)
    assert (found.low, found.high) == pytest.approx((0.6696, 0.8876), abs=1e-4)
    assert proportion(1.0, 10).high == 1.0
    assert proportion(0.0, 10).low == 0.0
    assert math.isnan(proportion(float("nan"), 3).low)


def test_the_bootstrap_covers_a_known_correlation():
    generator = np.random.default_rng(1)
    x = generator.normal(size=(40, 60))
    y = 0.7 * x + math.sqrt(1 - 0.49) * generator.normal(size=(40, 60))
    truth = 6 / math.pi * math.asin(0.7 / 2)
    inside = 0
    for a, b in zip(x, y, strict=True):
        found = bootstrapped(a, b, samples=200)
        assert found.low < found.value < found.high
        inside += found.low <= truth <= found.high
    assert inside >= 33


def test_recall_counts_the_true_best_among_the_checked():
    exact = np.array([9.0, -8, 7, 1, 0])
    scores = np.array([1.0, 5, 0, 4, 3])
    values = [r.value for r in recall_at(scores, exact, 3, [0, 1, 2, 4, 5])]
    assert values == pytest.approx([0, 1 / 3, 1 / 3, 2 / 3, 1])
    with pytest.raises(CircuitlabError) as refused:
        recall_at(scores, exact, 6, [1])
    assert refused.value.code == "k_out_of_range"


def test_scores_are_set_beside_exact_effects(toy):
    model, prompts, scores = toy
    found = calibrate(model, prompts, cl.logit_diff(), scores, top=15, random=10)
    assert found.points is not None
    assert found.points.num_rows == 25
    top = np.sort(np.abs(scores.scores))[-15:]
    points = found.points.to_pandas()
    assert np.sort(points[points.stratum == "top"].score.abs()) == pytest.approx(top)
    assert points[points.stratum == "random"].score.abs().max() <= top.min()
    one = points.iloc[3]
    alone = exact_effects(model, prompts, cl.logit_diff(), [one.edge])
    assert one.exact == pytest.approx(alone[one.edge].score, abs=1e-6)
    assert found.spearman.value > 0.8
    assert found.spearman.low <= found.spearman.value <= found.spearman.high
    assert found.sign_agreement.value > 0.8
    assert found.recall().num_rows == 0
    assert found.svg.count("<circle") == 25
    assert found.rows.schema.names[: len(EVAL.names)] == EVAL.names


def test_recall_where_every_edge_was_checked(toy):
    model, prompts, scores = toy
    exact = exact_effects(model, prompts, cl.logit_diff())
    found = calibrate(
        model,
        prompts,
        cl.logit_diff(),
        scores,
        top=len(scores),
        random=0,
        exact=exact,
        recall_of=[10, 20],
    )
    rows = found.recall().to_pylist()
    assert [row["checks"] for row in rows[:5]] == [10, 20, 40, 80, 160]
    values = [row["value"] for row in rows[:5]]
    assert values == sorted(values)
    assert values[-1] == 1.0
    # Scores that are the effects themselves are calibrated perfectly.
    itself = calibrate(
        model, prompts, cl.logit_diff(), exact, top=479, random=0, exact=exact
    )
    assert itself.spearman.value == pytest.approx(1)
    assert itself.sign_agreement.value == 1.0
    assert itself.recall().to_pylist()[0]["value"] == 1.0


def test_a_calibration_is_stored(toy, tmp_path):
    model, prompts, scores = toy
    found = calibrate(model, prompts, cl.logit_diff(), scores, top=5, random=5)
    with Store(tmp_path / "store.duckdb") as store:
        again = store.load(store.save(found))
    assert again.spearman == found.spearman
    assert again.run.parent == scores.run_id


def test_foreign_tables_are_refused(toy):
    model, prompts, scores = toy
    with pytest.raises(CircuitlabError) as refused:
        calibrate(model, prompts, cl.prob_diff(), scores)
    assert refused.value.code == "table_foreign"
    some = exact_effects(model, prompts, cl.logit_diff(), ["input->m0"])
    with pytest.raises(CircuitlabError) as refused:
        calibrate(model, prompts, cl.logit_diff(), scores, exact=some)
    assert refused.value.code == "table_foreign"


@pytest.fixture(scope="module")
def small():
    return family_model("gpt2"), token_prompts(5), token_prompts(4, seed=1)


@pytest.mark.parametrize(
    "ablation",
    [
        "zero",
        Mean(),
        Mean(positional=True),
        Mean(token_prompts(5)),
        Resample(seed=3),
        Resample(token_prompts(5), seed=2),
    ],
)
def test_the_ablation_is_the_scores(small, ablation: Any):
    model, prompts, _ = small
    metric = cl.logit_diff()
    scores = cl.edge_scores(model, prompts, metric, ablation=ablation)
    found = calibrate(model, prompts, metric, scores, top=4, random=4)
    assert found.points is not None
    names = found.points["edge"].to_pylist()
    truth = exact_effects(model, prompts, metric, names, ablation=ablation)
    assert found.exact is not None
    assert found.exact.run.policy_digest == truth.run.policy_digest
    assert found.points["exact"].to_pylist() == [truth[n].score for n in names]


@pytest.mark.parametrize("kind", [Mean, Resample])
def test_a_reference_that_a_table_has_no_prompts_of_is_asked_for(small, kind: Any):
    model, prompts, others = small
    metric, ablation = cl.logit_diff(), kind(others)
    scores = cl.edge_scores(model, prompts, metric, ablation=ablation)
    assert code_of(model, prompts, metric, scores) == "ablation_reference_needed"
    found = calibrate(
        model, prompts, metric, scores, top=3, random=3, ablation=ablation
    )
    assert found.exact is not None
    assert found.run.policy["ablation"]["reference"] == others.digest
    # Neither other prompts nor the same ones without their name will do.
    for wrong in (kind(), kind(prompts), "patch"):
        found = code_of(model, prompts, metric, scores, ablation=wrong)
        assert found == "table_foreign"


def test_exact_effects_of_something_else_are_refused(small):
    model, prompts, others = small
    metric = cl.logit_diff()
    scores = cl.edge_scores(model, prompts, metric, ablation="mean")
    wrong = {
        "metric": exact_effects(model, prompts, cl.prob_diff(), ablation="mean"),
        "reference": exact_effects(model, prompts, metric, ablation=Mean(others)),
        "positions": exact_effects(model, prompts, metric, ablation="mean_positional"),
        "dtype": exact_effects(
            family_model("gpt2", torch.float32), prompts, metric, ablation="mean"
        ),
        "scores": scores,
    }
    for what, exact in wrong.items():
        found = code_of(model, prompts, metric, scores, exact=exact)
        assert found == "table_foreign", what
    right = exact_effects(model, prompts, metric, ablation="mean")
    found = calibrate(model, prompts, metric, scores, exact=right)
    assert found.run.policy["ablation"] == describe(Mean())


def test_scores_of_another_model_are_refused(small):
    model, prompts, _ = small
    scores = cl.edge_scores(model, prompts, cl.logit_diff())
    same = family_model("gpt2", torch.float32)
    with pytest.raises(CircuitlabError) as refused:
        calibrate(same, prompts, cl.logit_diff(), scores)
    assert refused.value.code == "table_foreign"
    assert refused.value.fields["different"] == ["dtype", "weights"]


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("top_invalid", {"top": -1}),
        ("top_invalid", {"top": 2.5}),
        ("random_invalid", {"random": -1}),
        ("random_invalid", {"random": "3"}),
        ("calibration_empty", {"top": 0, "random": 0}),
        ("seed_invalid", {"seed": -1}),
        ("samples_invalid", {"samples": "many"}),
        ("batch_size_invalid", {"batch_size": 0}),
        ("memory_budget_invalid", {"memory_budget": "1GB"}),
        ("k_out_of_range", {"recall_of": 5}),
        ("k_out_of_range", {"recall_of": [0]}),
        ("edge_table_invalid", {"exact": "run"}),
    ],
)
def test_what_can_not_be_counted_is_refused(small, code: str, options: dict[str, Any]):
    model, prompts, _ = small
    scores = cl.edge_scores(model, prompts, cl.logit_diff())
    assert code_of(model, prompts, cl.logit_diff(), scores, **options) == code


def code_of(*args: Any, **options: Any) -> str:
    with pytest.raises(CircuitlabError) as refused:
        calibrate(*args, **options)
    return refused.value.code
