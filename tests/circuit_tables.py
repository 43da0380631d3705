"""Edge tables and circuits of small shapes, drawn at random, for the tests of circuits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st

from circuitlab.circuits import (
    Circuit,
)
from circuitlab.errors import CircuitlabError
from circuitlab.sites import ModelShape
from circuitlab.tables import EdgeTable, ModelInfo, Run, edge_rows

TOY = ModelShape(4, 4, 4, 64, 16, 200)
GROUPED = ModelShape(2, 4, 2, 8, 2, 50)
JOINED = ModelShape(2, 2, 2, 8, 4, 50, split_heads=False)
PARALLEL = ModelShape(3, 2, 2, 8, 4, 50, parallel=True)
SHAPES = [TOY, GROUPED, JOINED, PARALLEL]


def table_of(
    shape: ModelShape,
    scores: np.ndarray,
    *,
    status: list[str] | str = "ok",
    higher_is_better: bool = True,
) -> EdgeTable:
    info = ModelInfo("toy", "gpt2", "w", "float32", "none", shape)
    metric = {"name": "logit_diff", "higher_is_better": higher_is_better}
    policy = {"method": "eap", "reduction": "mean", "metric": metric}
    run = Run("edge", info, "data", "digest", 8, policy)
    return EdgeTable(edge_rows(shape, scores, None, 8, status), run)


def random_table(shape: ModelShape, seed: int = 0) -> EdgeTable:
    rng = np.random.default_rng(seed)
    return table_of(shape, rng.normal(size=shape.n_edges))


def code_of(call) -> str:
    with pytest.raises(CircuitlabError) as refused:
        call()
    assert refused.value.fields["code"] == refused.value.code
    return refused.value.code


# Few distinct values, so that ties are the rule.
score_values = st.sampled_from([0.0, -0.0, 0.5, -0.5, 1.0, -1.0, 2.0, np.inf, -np.inf])


@st.composite
def tables(draw) -> EdgeTable:
    shape = draw(st.sampled_from(SHAPES))
    pool = draw(st.lists(score_values, min_size=1, max_size=5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scores = np.array(pool)[rng.integers(0, len(pool), shape.n_edges)]
    scores[rng.random(shape.n_edges) < 0.1] = np.nan
    lost = rng.random(shape.n_edges) < 0.1
    status = np.where(lost, "unreachable", "ok").tolist()
    return table_of(shape, scores, status=status, higher_is_better=draw(st.booleans()))


@st.composite
def edge_sets(draw) -> Circuit:
    shape = draw(st.sampled_from(SHAPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kept = rng.random(shape.n_edges) < draw(st.sampled_from([0.0, 0.05, 0.2, 0.6, 1.0]))
    return Circuit(frozenset(np.array(shape.edge_names)[kept].tolist()), shape)


ranks = st.sampled_from(["magnitude", "support"])
