"""Calibration: what the statistics mean, and that they come from exact effects."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

import circuitlab as cl
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
