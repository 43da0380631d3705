"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from circuitlab import cli
from circuitlab.data import embedded_model
from circuitlab.store import Store

ROOT = Path(__file__).resolve().parent.parent
GOOD = {
    "clean": "When Mary and John went to the park, John gave a book to",
    "corrupted": "When Mary and John went to the park, Mary gave a book to",
    "answer": " Mary",
    "wrong_answer": " John",
}


@dataclass(frozen=True)
class Done:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def rows(self) -> list[dict[str, str]]:
        return list(csv.DictReader(io.StringIO(self.out)))


class Lab:
    """Runs commands of this process on one store."""

    def __init__(self, store: Path, capsys: pytest.CaptureFixture[str] | None = None):
        self.store, self.capsys = store, capsys

    def __call__(self, *words: object) -> Done:
        assert self.capsys is not None
        self.capsys.readouterr()
        code = cli.run([*map(str, words), "--store", str(self.store)])
        printed = self.capsys.readouterr()
        return Done(code, printed.out, printed.err)


@pytest.fixture(scope="session")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A store with one run of scores, and that run's id."""
    store = tmp_path_factory.mktemp("cli") / "store.duckdb"
    code = cli.run(
        ["score", "embedded", "--n", "8", "--method", "eap", "--store", str(store)]
    )
    assert code == 0
    (row,) = Store(store).runs().to_pylist()
    return store, row["run_id"]


@pytest.fixture
def lab(scored: tuple[Path, str], capsys: pytest.CaptureFixture[str]) -> Lab:
    return Lab(scored[0], capsys)


@pytest.fixture
def run_id(scored: tuple[Path, str]) -> str:
    return scored[1]


@pytest.fixture
def pairs(tmp_path: Path):
    """Writes a prompt file of rows that differ from a good one."""

    def write(*changes: dict[str, object], name: str = "pairs.jsonl") -> Path:
        path = tmp_path / name
        lines = [json.dumps({**GOOD, **change}) for change in changes or [{}]]
        path.write_text("\n".join(lines), encoding="utf-8")
        return path

    return write


def test_score_saves_the_run_with_prompts_and_recipe(lab: Lab, run_id: str):
    (row,) = lab("runs", "--kind", "edge", "--json").json
    assert row["run_id"] == run_id
    assert (row["task"], row["method"], row["metric"]) == ("ioi", "eap", "logit_diff")
    told = row["provenance"]["command"]
    assert told["model"] == "embedded"
    assert (told["n"], told["seed"], told["method"]) == (8, 0, "eap")
    prompts = Store(lab.store).load_prompts(row["dataset_digest"])
    assert len(prompts) == 8


def test_score_twice_is_the_same_run(lab: Lab, run_id: str):
    again = lab("score", "embedded", "--n", 8, "--method", "eap", "--json")
    assert again.code == 0
    assert again.json["run_id"] == run_id
    best = [abs(row["score"]) for row in again.json["top"]]
    assert best == sorted(best, reverse=True)


def test_score_as_csv_gives_every_edge_and_nothing_else(lab: Lab, run_id: str):
    done = lab("score", "embedded", "--n", 8, "--method", "eap", "--csv")
    edges = Store(lab.store).load(run_id)
    assert [row["edge"] for row in done.rows] == edges.rows["edge"].to_pylist()
    assert [float(row["score"]) for row in done.rows] == edges.scores.tolist()
    assert done.err == ""


def test_circuit_stores_what_it_prints(lab: Lab, run_id: str):
    done = lab("circuit", run_id[:8], "--top-k", 40, "--json")
    found = done.json
    saved = Store(lab.store).load(found["run_id"])
    assert saved.id == found["circuit_id"]
    assert list(saved.ordered) == [row["edge"] for row in found["edges"]]
    assert found["k"] == 40
    assert found["n_edges"] == len(saved) <= 40
    shown = lab("circuit", run_id, "--top-k", 40).out
    assert found["circuit_id"] in shown
    assert all(edge in shown for edge in saved.ordered)


def test_every_way_to_select(lab: Lab, run_id: str):
    sizes = {
        words: lab("circuit", run_id, *words, "--no-prune", "--json").json["n_edges"]
        for words in [
            ("--top-k", 10),
            ("--top-fraction", 0.05),
            ("--greedy", 12),
            ("--mass", 1),
            ("--threshold", 0),
            ("--select", "input->logits"),
            ("--top-k", 2, "--select", "*->logits"),
        ]
    }
    assert list(sizes.values())[:3] == [10, 14, 12]
    assert sizes["--mass", 1] == sizes["--threshold", 0] > 14
    assert list(sizes.values())[5:] == [1, 2]


def test_a_circuit_is_evaluated_by_either_id_and_by_its_run(lab: Lab, run_id: str):
    made = lab("circuit", run_id, "--top-k", 40, "--json").json
    found = [
        lab("evaluate", made["circuit_id"][:10], "--json").json,
        lab("evaluate", made["run_id"], "--json").json,
        lab("evaluate", run_id, "--top-k", 40, "--json").json,
    ]
    assert found[0] == found[1]
    assert {row["circuit_id"] for row in found} == {made["circuit_id"]}
    assert len({row["faithfulness"] for row in found}) == 1
    assert found[0]["prompts_overlap"] is False
    low, high = found[0]["faithfulness_low"], found[0]["faithfulness_high"]
    assert low <= found[0]["faithfulness"] <= high
    saved = Store(lab.store).load_record(found[0]["run_id"])
    assert saved.run.parent == made["run_id"]


def test_the_full_and_the_empty_circuit(lab: Lab, run_id: str):
    full = lab("evaluate", run_id, "--threshold", -1, "--no-prune", "--json").json
    none = lab("evaluate", run_id, "--top-k", 0, "--json").json
    assert full["faithfulness"] == pytest.approx(1, abs=1e-5)
    assert none["faithfulness"] == pytest.approx(0, abs=1e-5)


def test_evaluate_on_the_scored_prompts_says_that_they_overlap(lab: Lab, run_id: str):
    found = lab("evaluate", run_id, "--top-k", 40, "--on", "scored", "--json").json
    assert found["prompts_overlap"] is True
    assert found["n"] == 8


def test_a_file_is_split_into_scored_and_held_out(lab: Lab, pairs):
    names = ["Mary", "John", "James", "Robert", "David", "Emma"]
    rows = []
    for io_, s in zip(names, names[1:] + names[:1], strict=True):
        clean = f"When {io_} and {s} went to the park, {s} gave a book to"
        corrupted = f"When {io_} and {s} went to the park, {io_} gave a book to"
        rows.append(
            {"clean": clean, "corrupted": corrupted, "answer": f" {io_}",
             "wrong_answer": f" {s}"}
        )  # fmt: skip
    path = pairs(*rows)
    options = ("--file", path, "--method", "eap", "--json")
    run = lab("score", "embedded", "--n", 4, *options)
    assert run.code == 0, run.err
    held = lab("evaluate", run.json["run_id"], "--top-k", 40, "--json").json
    assert (run.json["n"], held["n"], held["prompts_overlap"]) == (4, 2, False)
    every = lab("score", "embedded", *options).json["run_id"]
    refused = lab("evaluate", every, "--top-k", 40)
    assert "error[no_held_out_prompts]" in refused.err


def test_curve(lab: Lab, run_id: str):
    rows = lab("curve", run_id, "--sizes", "10,40,262", "--no-prune", "--csv").rows
    assert [int(row["n_edges"]) for row in rows] == [10, 40, 262]
    assert float(rows[-1]["faithfulness"]) == pytest.approx(1, abs=1e-5)
    mib = lab("curve", run_id, "--sizes", "mib")
    assert re.search(r"CPR -?\d.*CMD \d", mib.out)


def test_rerun_gives_the_same_run(lab: Lab, run_id: str):
    done = lab("rerun", run_id, "--json")
    assert done.json["run_id"] == run_id
    assert "bit for bit" in done.err


def test_sql_in_every_form(lab: Lab, run_id: str, tmp_path: Path):
    query = "select edge, score from v_edge where run_id = $run order by edge limit 3"
    words = ("sql", query, "--param", f"run={json.dumps(run_id)}")
    as_json, as_csv = lab(*words, "--json").json, lab(*words, "--csv").rows
    assert [row["edge"] for row in as_json] == [row["edge"] for row in as_csv]
    assert [row["score"] for row in as_json] == [float(row["score"]) for row in as_csv]
    file = tmp_path / "rows.parquet"
    assert lab(*words, "--parquet", file).out == ""
    assert pq.read_table(file).to_pylist() == as_json
    named = lab("sql", "@top_edges", "--param", f"run={run_id[:8]}", "--json").json
    assert named
    assert "@top_edges" in lab("sql").out


def test_upkeep_of_a_store(lab: Lab, run_id: str, tmp_path: Path):
    assert lab("store", "tag", run_id, "first", "good").code == 0
    assert lab("store", "note", run_id, "look again").code == 0
    (row,) = lab("runs", "--tag", "good", "--json").json
    assert (row["tags"], row["note"]) == (["first", "good"], "look again")
    assert lab("store", "tag", run_id, "good", "--remove").code == 0
    assert lab("runs", "--tag", "good", "--json").json == []
    assert lab("store", "delete", run_id).code == 0
    assert lab("runs", "--kind", "edge", "--task", "ioi", "--json").json == []
    assert lab("store", "restore", run_id).code == 0
    assert lab("store", "fold", "--json").json["pending"] == 0
    assert lab("store", "check", "--deep", "--json").json["problems"] == []


def test_export_import_and_merge(
    lab: Lab, run_id: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert lab("export", tmp_path / "out", run_id, "--json").json == [run_id]
    other = Lab(tmp_path / "other.duckdb", capsys)
    assert other("import", tmp_path / "out", "--json").json == [run_id]
    third = Lab(tmp_path / "third.duckdb", capsys)
    assert third("store", "merge", other.store, "--json").json == [run_id]
    found = Store(third.store).load(run_id)
    assert found.rows.equals(Store(lab.store).load(run_id).rows)


def test_tasks_and_models(capsys: pytest.CaptureFixture[str]):
    assert cli.run(["tasks", "--json"]) == 0
    names = [row["task"] for row in json.loads(capsys.readouterr().out)]
    assert {"ioi", "greater_than", "induction"} <= set(names)
    assert cli.run(["tasks", "show", "ioi", "--n", "3", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 3
    assert all(row["clean"] != row["corrupted"] for row in rows)
    assert cli.run(["tasks", "check", "--task", "ioi", "--n", "32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["accuracy_clean"] > 0.9
    assert found["logit_diff_clean"] > found["logit_diff_corrupted"]
    assert cli.run(["models", "check", "embedded", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["n_layers"], facts["edges"], facts["probes"]) == (3, 262, "passed")


def test_demo(lab: Lab, tmp_path: Path):
    svg = tmp_path / "circuit.svg"
    done = lab("demo", "--n", 16, "--svg", svg)
    assert done.code == 0, done.err
    assert svg.read_text(encoding="utf-8").lstrip().startswith("<svg")
    ids = re.findall(
        r"^  (?:scores|circuit|evaluation) +(\w{32})$", done.out, re.MULTILINE
    )
    kinds = [Store(lab.store).load_record(found).run.kind for found in ids]
    assert kinds == ["edge", "circuit", "eval"]
    assert re.search(r"faithfulness .* \d\.\d+ ", done.out)
    assert str(lab.store) in done.out


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        (["score", "no/such-model"], 2, "model_not_found"),
        (["score", "./no-such-folder"], 2, "model_file_missing"),
        (["score", "embedded", "--file", "missing.jsonl"], 2, "prompts_file_missing"),
        (["score", "embedded", "--task", "ioo"], 2, "task_unknown"),
        (["score", "embedded", "--metric", "loss"], 2, "metric_unknown"),
        (["score", "embedded", "--method", "magic"], 2, "method_unknown"),
        (["score", "embedded", "--ablation", "magic"], 2, "ablation_unknown"),
        (["score", "embedded", "--rule", "magic"], 2, "ig_rule_unknown"),
        (["score", "embedded", "--n", "0"], 2, "task_size_invalid"),
        (
            ["score", "embedded", "--task", "ioi", "--file", "x.csv"],
            2,
            "prompts_ambiguous",
        ),
        (
            ["score", "embedded", "--metric", "kl", "--method", "eap"],
            2,
            "metric_stationary_at_clean",
        ),
        (["circuit", "RUN", "--top-k", "100000"], 2, "k_out_of_range"),
        (["circuit", "RUN"], 2, "selection_ambiguous"),
        (["circuit", "RUN", "--top-k", "3", "--greedy", "3"], 2, "selection_ambiguous"),
        (["circuit", "RUN", "--select", "a9.h0<q>"], 2, "selector_out_of_range"),
        (["circuit", "0123456789", "--top-k", "3"], 3, "run_unknown"),
        (["evaluate", "01", "--top-k", "3"], 3, "run_id_too_short"),
        (["curve", "RUN", "--sizes", "a,b"], 2, "sizes_invalid"),
        (["sql", "drop table run"], 3, "sql_not_read_only"),
        (["sql", "select nothing"], 3, "sql_failed"),
        (["sql", "@nothing"], 2, "query_unknown"),
        (["runs", "--nothing"], 2, "usage"),
        (["nothing"], 2, "usage"),
        (["score"], 2, "usage"),
    ],
)
def test_a_refusal_is_one_line_on_stderr(
    words: Sequence[str], code: int, error: str, lab: Lab, run_id: str
):
    done = lab(*[run_id if word == "RUN" else word for word in words])
    assert (done.code, done.out) == (code, "")
    assert done.err.startswith(f"error[{error}]: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"corrupted": "When Mary went to the park, Mary gave a book to"},
         "prompt_lengths_differ"),
        ({"answer": " Mary John"}, "answer_not_single_token"),
        ({"answer": 3}, "prompts_row_invalid"),
    ],
)  # fmt: skip
def test_bad_prompts_are_refused(change: dict, error: str, lab: Lab, pairs):
    done = lab("score", "embedded", "--file", pairs({}, change), "--method", "eap")
    assert done.code == 2
    assert done.err.startswith(f"error[{error}]: ")
    assert done.err.count("\n") == 1


def test_what_is_no_store_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "notes.duckdb"
    path.write_text("my notes\n")
    for words in (["runs"], ["score", "embedded", "--n", "2", "--method", "eap"]):
        done = Lab(path, capsys)(*words)
        assert (done.code, done.out) == (3, "")
        assert done.err.startswith("error[store_not_duckdb]: ")
    assert path.read_text() == "my notes\n"
    assert cli.run(["runs", "--store", str(tmp_path / "none.duckdb")]) == 3
    assert "error[store_missing]" in capsys.readouterr().err


def test_debug_shows_where_an_error_came_from(lab: Lab, run_id: str):
    words = ("circuit", run_id, "--top-k", 100_000)
    assert "Traceback" not in lab(*words).err
    shown = lab("--debug", *words)
    assert shown.code == 2
    assert "Traceback" in shown.err
    assert shown.err.splitlines()[-1].startswith("error[k_out_of_range]: ")


def test_another_model_than_the_scored_one_is_refused(
    lab: Lab, run_id: str, tmp_path: Path
):
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(embedded_model())
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    model.save_pretrained(tmp_path / "other")
    for path in embedded_model().glob("tokenizer*"):
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    done = lab("evaluate", run_id, "--top-k", 40, "--model", tmp_path / "other")
    assert done.code == 2
    assert done.err.startswith("error[model_differs]: ")


def program(*words: str, **more: Any) -> subprocess.Popen[str]:
    code = "import sys; from circuitlab.cli import main; sys.argv[0] = 'circuitlab'; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **more,
    )


def test_help_and_the_store_load_no_torch(lab: Lab):
    code = (
        "import sys\n"
        "from circuitlab import cli\n"
        "for words in (['--help'], ['score', '--help'], ['sql', '--help']):\n"
        "    assert cli.run(words) == 0\n"
        f"assert cli.run(['runs', '--store', {str(lab.store)!r}]) == 0\n"
        "assert not {'torch', 'transformer_lens', 'streamlit'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_ctrl_c_stops_cleanly(tmp_path: Path):
    ready = tmp_path / "ready"
    code = (
        "import pathlib, sys, time\n"
        "from circuitlab import cli, cli_score\n"
        "def slow(*_):\n"
        f"    pathlib.Path({str(ready)!r}).touch()\n"
        "    time.sleep(60)\n"
        "cli_score.score_and_save = slow\n"
        "sys.exit(cli.run(['score', 'embedded']))\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=subprocess.PIPE,
        text=True,
        # A shell that started us in the background may have told us to ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    while not ready.exists() and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 130
    assert err == "interrupted; what was saved stays\n"


def test_a_closed_pipe_is_no_error(lab: Lab):
    child = program("sql", "select * from range(100000)", "--store", str(lab.store))
    assert child.stdout is not None
    child.stdout.readline()
    child.stdout.close()
    assert child.stderr is not None
    assert "Traceback" not in child.stderr.read()
    child.wait(30)


def test_the_library_example_of_the_readme_runs(tmp_path: Path):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example],
        cwd=tmp_path,
        env={**os.environ, "CIRCUITLAB_STORE": str(tmp_path / "s.duckdb")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    faithfulness, low, high = map(float, done.stdout.split())
    assert low <= faithfulness <= high
    assert (tmp_path / "s.duckdb").exists()
