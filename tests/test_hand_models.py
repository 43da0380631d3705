"""Hand-weighted models: scores find the edges that were wired, and circuits are exact."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

import numpy as np
import pytest

import circuitlab as cl
from tests.hand_models import HandModel, induction_model, ioi_model

SIZES = {"induction": (46, 7, 4), "ioi": (262, 22, 12), "ioi_sharp": (262, 22, 12)}
EAP_FLOOR = {"induction": 0.95, "ioi": 0.95, "ioi_sharp": 0.85}
DIFFERENCE = {"induction": 10.0, "ioi": 12.0, "ioi_sharp": 12.0}


@dataclass(frozen=True)
class Loaded:
    name: str
    hand: HandModel
    model: object


@pytest.fixture(scope="module", params=list(SIZES))
def loaded(request) -> Loaded:
    name = request.param
    if name == "induction":
        hand = induction_model()
    else:
        hand = ioi_model(sharp=name == "ioi_sharp")
    return Loaded(name, hand, cl.load_model(hand.model))


def auroc(values: np.ndarray, positive: np.ndarray) -> float:
    """The chance that a positive's value beats another's; a tie is half a win.

    From midranks (Mann and Whitney 1947).
    """
    order = np.sort(values)
    below = np.searchsorted(order, values, "left")
    upto = np.searchsorted(order, values, "right")
    midrank = (below + upto + 1) / 2
    wins, losses = positive.sum(), (~positive).sum()
    return (midrank[positive].sum() - wins * (wins + 1) / 2) / (wins * losses)


def separation(edges: cl.EdgeTable, positive: Set[str]) -> float:
    names = edges.rows["edge"].to_pylist()
    return auroc(np.abs(edges.scores), np.array([name in positive for name in names]))


def scores(loaded: Loaded, prompts: cl.Prompts, method) -> cl.EdgeTable:
    return cl.edge_scores(loaded.model, prompts, cl.logit_diff(), method=method)


def kept(loaded: Loaded, prompts: cl.Prompts, edges: Set[str]):
    circuit = cl.Circuit.from_edges(edges)
    return cl.evaluate(loaded.model, prompts, cl.logit_diff(), circuit)


def test_auroc_counts_pairs_and_halves_ties():
    values = np.array([3.0, 1.0, 2.0, 2.0, 0.0])
    positive = np.array([True, False, True, False, False])
    assert auroc(values, positive) == pytest.approx((3 + 2.5) / 6)
    assert auroc(np.zeros(5), positive) == 0.5


def test_the_models_have_the_edges_they_claim(loaded):
    universe, wired, carries = SIZES[loaded.name]
    names = set(loaded.model.shape.edge_names)
    assert len(names) == universe
    assert len(loaded.hand.wired) == wired
    assert len(loaded.hand.carries) == carries
    assert loaded.hand.carries < loaded.hand.wired < names


def test_the_wired_circuit_is_everything_and_its_complement_nothing(loaded):
    for prompts in (loaded.hand.prompts, loaded.hand.blanked):
        wired = kept(loaded, prompts, loaded.hand.wired)
        rest = set(loaded.model.shape.edge_names) - loaded.hand.wired
        assert wired.metric_full == pytest.approx(DIFFERENCE[loaded.name], abs=0.15)
        assert wired.metric_ablated == pytest.approx(0.0, abs=1e-3)
        assert wired.faithfulness == pytest.approx(1.0, abs=5e-4)
        assert kept(loaded, prompts, rest).faithfulness == pytest.approx(0.0, abs=5e-4)


def test_edges_that_carry_no_difference_are_not_needed(loaded):
    found = kept(loaded, loaded.hand.prompts, loaded.hand.carries)
    assert found.faithfulness == pytest.approx(1.0, abs=5e-4)


def test_each_edge_alone_changes_the_answer_exactly_where_it_carries(loaded):
    """Patching one edge is running the circuit of all the others."""
    names = set(loaded.model.shape.edge_names)
    prompts = loaded.hand.prompts[:8]
    for edge in loaded.hand.wired:
        found = kept(loaded, prompts, names - {edge})
        change = abs(found.metric - found.metric_full)
        assert (change > 0.01) == (edge in loaded.hand.carries), (edge, change)


@pytest.mark.parametrize(
    ("method", "floors"),
    [(cl.EAPIG(), dict.fromkeys(SIZES, 0.98)), (cl.EAP(), EAP_FLOOR)],
    ids=["EAP-IG", "EAP"],
)
def test_scores_separate_the_wired_edges(loaded, method, floors):
    hand, floor = loaded.hand, floors[loaded.name]
    assert separation(scores(loaded, hand.blanked, method), hand.wired) >= floor
    assert separation(scores(loaded, hand.prompts, method), hand.carries) >= floor
