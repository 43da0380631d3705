"""The main job on a real model, small: prompts to a measured circuit, by commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from circuitlab import cli


@pytest.mark.real_model
@pytest.mark.slow
def test_a_sparse_circuit_of_smollm2(
    smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    store = ["--store", str(tmp_path / "store.duckdb"), "--json"]

    def run(*words: str):
        capsys.readouterr()
        code = cli.run([*words, *store])
        printed = capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)

    words = ("--task", "greater_than", "--n", "8", "--steps", "2", "--no-bos")
    scored = run("score", str(smollm2), *words)
    assert scored["n_edges"] == 70_651
    found = run("evaluate", scored["run_id"], "--top-k", "3500")
    assert found["n_edges"] <= 0.05 * 70_651
    assert found["prompts_overlap"] is False
    assert 0.5 < found["faithfulness"] < 1.5
    assert found["accuracy"] > 0.5
