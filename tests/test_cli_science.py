"""The commands that check, search and edit, on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from circuitlab import cli
from circuitlab.store import Store


class Lab:
    """Runs commands of this process on one store; gives what `--json` printed."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str]):
        self.store, self.capsys = store, capsys

    def __call__(self, *words: object):
        self.capsys.readouterr()
        options = ["--json", "--store", str(self.store)]
        code = cli.run([*map(str, words), *options])
        printed = self.capsys.readouterr()
        assert code == 0, printed.err
        return json.loads(printed.out)


@pytest.fixture
def lab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(tmp_path / "store.duckdb", capsys)


def test_exact_effects_judge_the_scores(lab: Lab):
    run_id = lab("score", "embedded", "--n", 4, "--method", "eap")["run_id"]
    found = lab("calibrate", run_id, "--best", 6, "--random", 4)
    names = {(row["statistic"], row["stratum"]) for row in found["rows"]}
    assert ("spearman", "all") in names
    exact = Store(lab.store).load(found["exact_run"])
    assert exact.run.policy["method"] == "exact"
    assert sum(row.status == "ok" for row in exact) == 10


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("calibrate", "abcdef", "--random", -1), "usage"),
        (("calibrate", "abcdef", "--best", -1), "usage"),
        (("calibrate", "abcdef", "--seed", -1), "usage"),
        (("validate", "abcdef", "--knockouts", -1), "usage"),
        (("validate", "abcdef", "--random", -1), "usage"),
        (("evaluate", "abcdef", "--seed", -1), "usage"),
        (("score", "embedded", "--seed", -1), "usage"),
        (("mask", "embedded", "--gate-seed", -1), "usage"),
        (("mask", "embedded", "--open", 1.0), "training_invalid"),
        (("mask", "embedded", "--batch-size", 0, "--n", 2), "batch_size_invalid"),
        (("nodes", "embedded", "--batch-size", 0, "--n", 2), "batch_size_invalid"),
        (("nodes", "embedded", "--method", "exact"), "method_unsupported"),
        (
            ("nodes", "embedded", "--method", "eap", "--metric", "kl"),
            "metric_stationary_at_clean",
        ),
    ],
)
def test_numbers_and_names_that_can_not_be_used_are_refused(
    lab: Lab, words: tuple[object, ...], code: str
):
    assert cli.run([*map(str, words), "--store", str(lab.store)]) == 2
    assert lab.capsys.readouterr().err.startswith(f"error[{code}]: ")


def test_nothing_to_check_is_no_calibration(lab: Lab):
    run_id = lab("score", "embedded", "--n", 2, "--method", "eap")["run_id"]
    words = ["calibrate", run_id, "--best", "0", "--random", "0"]
    assert cli.run([*words, "--store", str(lab.store)]) == 2
    assert lab.capsys.readouterr().err.startswith("error[calibration_empty]: ")
    assert len(lab("runs")) == 1


def test_validate_compares_the_circuit_with_its_complement_and_chance(lab: Lab):
    run_id = lab("score", "embedded", "--n", 8)["run_id"]
    circuit = lab("circuit", run_id, "--top-k", 60)["circuit_id"]
    words = ("--knockouts", 0, "--random", 3, "--minimality", "none")
    rows = lab("validate", circuit, *words)["rows"]
    labels = [row["label"] for row in rows]
    assert labels.count("random") == 3
    by_label = {row["label"]: row for row in rows}
    assert by_label["circuit"]["n_edges"] + by_label["complement"]["n_edges"] == 262
    evaluated = lab("evaluate", circuit)
    assert by_label["circuit"]["faithfulness"] == pytest.approx(
        evaluated["faithfulness"], abs=1e-5
    )


def test_acdc_saves_decisions_and_circuits_that_can_be_evaluated(lab: Lab):
    words = ("--n", 4, "--threshold", 0.1, "--threshold", 0.5)
    found = lab("acdc", "embedded", *words)
    assert [one["threshold"] for one in found] == [0.1, 0.5]
    assert found[0]["n_edges"] >= found[1]["n_edges"] > 0
    decisions = Store(lab.store).load(found[0]["decisions_run"])
    assert decisions.run.policy["method"] == "acdc"
    measured = lab("evaluate", found[0]["circuit_id"], "--metric", "logit_diff")
    assert measured["n_edges"] == found[0]["n_edges"]
    assert measured["prompts_overlap"] is False
    within = lab("acdc", "embedded", *words[:4], "--start", found[0]["circuit_id"])
    edges = set(Store(lab.store).load(within[0]["run_id"]).edges)
    assert edges <= set(Store(lab.store).load(found[0]["run_id"]).edges)


def test_sites_are_listed_by_glob(lab: Lab, capsys: pytest.CaptureFixture[str]):
    assert cli.run(["sites", "embedded", "blocks.*.attn.q.hook_out", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["site"] for row in rows] == [
        f"blocks.{layer}.attn.q.hook_out" for layer in range(3)
    ]
    assert {row["status"] for row in rows} == {"ok"}
    assert cli.run(["sites", "embedded", "blocks.0.attn.q.hook_outt"]) == 2
    assert capsys.readouterr().err.startswith("error[site_unknown]: ")


def test_read_saves_act_rows(lab: Lab):
    found = lab("read", "embedded", "--within", "blocks.*.hook_out", "--n", 4)
    assert {row["site"] for row in found["top"]} == {
        f"blocks.{layer}.hook_out" for layer in range(3)
    }
    saved = Store(lab.store).load(found["run_id"])
    assert saved.run.kind == "act"
    assert saved.run.provenance["command"]["model"] == "embedded"


def test_intervene_reports_the_metric_with_and_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    edits = {
        "edits": {"blocks.*.attn.hook_z": {"mode": "scale", "scale_factor": 0}},
        "config": {"positions": "all"},
    }
    path = tmp_path / "edits.json"
    path.write_text(json.dumps(edits), encoding="utf-8")
    assert cli.run(["intervene", "embedded", str(path), "--n", "4", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 4
    assert all(row["metric"] != row["metric_baseline"] for row in rows)
    assert sum(row["change"] for row in rows) < 0
    path.write_text("{}", encoding="utf-8")
    assert cli.run(["intervene", "embedded", str(path), "--n", "4"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("name", ["c.json", "c.graphml", "c.dot", "c.csv"])
def test_a_circuit_goes_out_and_comes_back(lab: Lab, tmp_path: Path, name: str):
    run_id = lab("score", "embedded", "--n", 2, "--method", "eap")["run_id"]
    circuit = lab("circuit", run_id, "--top-k", 30)
    lab("export", tmp_path / name, circuit["circuit_id"])
    other = Lab(tmp_path / "other.duckdb", lab.capsys)
    (saved,) = other("import", tmp_path / name)
    assert Store(other.store).load(saved).id == circuit["circuit_id"]


def test_a_circuit_is_drawn(lab: Lab, tmp_path: Path):
    run_id = lab("score", "embedded", "--n", 2, "--method", "eap")["run_id"]
    circuit = lab("circuit", run_id, "--top-k", 30)["circuit_id"]
    lab("export", tmp_path / "c.svg", circuit)
    assert (tmp_path / "c.svg").read_text(encoding="utf-8").lstrip().startswith("<svg")


def test_a_sweep_runs_and_goes_on(lab: Lab, tmp_path: Path):
    plan = tmp_path / "small.toml"
    lines = ['models = ["embedded"]', 'tasks = ["ioi"]', 'methods = ["eap"]']
    lines += ["sizes = [20, 60]", "n = 4", "held = 4"]
    plan.write_text("\n".join(lines), encoding="utf-8")
    first = lab("sweep", plan)
    assert [row["n_edges"] > 0 for row in first["rows"]] == [True, True]
    assert first["failures"] == []
    assert lab("sweep", plan)["run_ids"] == first["run_ids"]
    tagged = lab("runs", "--tag", "sweep:small")
    assert {row["run_id"] for row in tagged} == set(first["run_ids"])
