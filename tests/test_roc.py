"""ROC curves of circuits against a known one."""

from __future__ import annotations

import pytest

import circuitlab as cl
from circuitlab.errors import CircuitlabError
from circuitlab.roc import compared, roc
from circuitlab.sites import ModelShape

SHAPE = ModelShape(2, 2, 2, 8, 4, 11)
KNOWN = cl.Circuit.from_edges(
    ["input->m0", "m0->logits", "m0->m1", "m1->logits"], SHAPE
)
EVERY = cl.Circuit(frozenset(SHAPE.edge_names), SHAPE)


def test_a_perfect_circuit_has_area_one_and_everything_half():
    assert roc([KNOWN], KNOWN).auc == 1.0
    assert roc([EVERY], KNOWN).auc == 0.5
    assert roc([KNOWN.complement()], KNOWN).auc == pytest.approx(0.5)
    found = roc([KNOWN, EVERY], KNOWN)
    assert (found.n_universe, found.n_known) == (SHAPE.n_edges, 4)
    assert found.rows["true_positive_rate"].to_pylist() == [1.0, 1.0]


def test_points_that_are_beaten_do_not_count():
    good = cl.Circuit.from_edges(["input->m0", "m0->logits"], SHAPE)
    bad = cl.Circuit.from_edges(["input->m0", "input->m1", "a0.h0->m1"], SHAPE)
    assert roc([good, bad], KNOWN).auc == roc([good], KNOWN).auc == 0.75


def test_the_universe_is_stated():
    start = cl.Circuit.from_edges(
        ["input->m0", "m0->logits", "input->m1", "a0.h0->m1"], SHAPE
    )
    found = roc([KNOWN], KNOWN, universe=start)
    assert (found.n_universe, found.n_known) == (4, 2)
    assert found.rows["outside"].to_pylist() == [2]
    assert found.rows["false_positive_rate"].to_pylist() == [0.0]


def test_refusals():
    for circuit in (EVERY, cl.Circuit.from_edges([], SHAPE)):
        with pytest.raises(CircuitlabError) as refused:
            roc([KNOWN], circuit)
        assert refused.value.code == "known_circuit_empty"
    loose = cl.Circuit.from_edges(["input->m0"])
    with pytest.raises(CircuitlabError) as refused:
        roc([loose], loose)
    assert refused.value.code == "universe_unknown"
    for wrong in (KNOWN, ["input->m0"], 3):
        with pytest.raises(CircuitlabError) as refused:
            roc(wrong, KNOWN)  # type: ignore[arg-type]
        assert refused.value.code == "circuit_invalid"
    with pytest.raises(CircuitlabError) as refused:
        roc([KNOWN], KNOWN, universe=["input->m0"])  # type: ignore[arg-type]
    assert refused.value.code == "universe_invalid"


def test_an_empty_universe_is_not_the_whole_model():
    nothing = cl.Circuit.from_edges([], SHAPE)
    with pytest.raises(CircuitlabError) as refused:
        roc([KNOWN], KNOWN, universe=nothing)
    assert refused.value.code == "known_circuit_empty"


def test_any_circuit_with_a_shape_says_which_edges_there_are():
    loose = cl.Circuit.from_edges(KNOWN.edges)
    assert roc([loose, KNOWN], loose).n_universe == SHAPE.n_edges


def test_circuits_of_models_of_different_shape_are_refused():
    other = cl.Circuit.from_edges(["input->m0"], ModelShape(1, 2, 2, 8, 4, 11))
    wider = ModelShape(2, 2, 2, 16, 4, 50)  # the same edges
    for circuits, known, universe in (
        ([other], KNOWN, None),
        ([KNOWN], other, None),
        ([KNOWN], KNOWN, other),
        ([KNOWN], KNOWN, other.shape),
    ):
        with pytest.raises(CircuitlabError) as refused:
            roc(circuits, known, universe=universe)
        assert refused.value.code == "circuit_shape_mismatch"
    assert roc([cl.Circuit(KNOWN.edges, wider)], KNOWN).auc == 1.0


def test_where_all_is_known_only_the_false_rate_and_the_area_are_missing():
    part = cl.Circuit.from_edges(["input->m0"], SHAPE)
    found = compared([part], KNOWN, universe=KNOWN)
    (row,) = found.rows.to_pylist()
    assert (row["precision"], row["true_positive_rate"]) == (1.0, 0.25)
    assert found.auc is row["false_positive_rate"] is None
    assert "no AUC" in found._repr_html_()
