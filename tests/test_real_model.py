"""The main job on a real model: pronouns in SmolLM2-135M-Instruct.

Eight pairs are scored, four others evaluate the circuit. The model is grouped-query,
with 30 layers and 70,651 edges.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from circuitlab.backends import Backend, load_model
from circuitlab.circuits import top_fraction
from circuitlab.edges import edge_scores
from circuitlab.evaluate import evaluate
from circuitlab.methods import EAPIG
from circuitlab.metrics import logit_diff
from circuitlab.prompts import Prompts
from circuitlab.store import Store

pytestmark = pytest.mark.real_model

PAIRS = Path(__file__).parent / "data" / "gendered_pronoun.jsonl"


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Backend:
    return load_model(smollm2)


def test_a_sparse_circuit_carries_the_pronouns(model: Backend, tmp_path: Path):
    assert model.shape.n_edges == 70_651
    prompts = Prompts.from_file(PAIRS, model=model, prepend_bos=False)
    scored, held = prompts.split(8, seed=0)
    edges = edge_scores(model, scored, logit_diff(), method=EAPIG(2))
    assert edges.rows["status"].unique().to_pylist() == ["ok"]
    assert np.isfinite(edges.scores).all()
    ran = edges.run.provenance
    assert ran["metric_clean"] > 1 > -1 > ran["metric_ablated"]

    circuit = top_fraction(edges, 0.05)
    assert len(circuit) <= 0.05 * model.shape.n_edges
    found = evaluate(model, held, logit_diff(), circuit, scored=scored)
    assert found.faithfulness > 0.7
    assert found.prompts_overlap is False
    rest = evaluate(model, held, logit_diff(), circuit.complement())
    assert abs(rest.faithfulness) < 0.3

    with Store(tmp_path / "store.duckdb") as store:
        again = store.load(store.save(edges))
    assert again.rows.equals(edges.rows)
