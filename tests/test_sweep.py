"""Sweeps are planned, resumed, retried and summed up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import circuitlab as cl
from circuitlab import checkpoint, cli
from circuitlab.engines import Outcome, Processes, Ray, Serial
from circuitlab.errors import CircuitlabError
from circuitlab.store import Store
from circuitlab.sweep import Sweep, cell_prompts, estimate, run_cell, run_sweep
from circuitlab.sweep_cells import METHODS
from scripts import sweep_acdc
from tests.distributed_tasks import dying_cell

SMALL: dict[str, Any] = {
    "name": "small",
    "models": ("embedded",),
    "tasks": ("induction",),
    "methods": ("eap", "acdc"),
    "sizes": (20, 0.5),
    "thresholds": (0.5, 0.05),
    "n": 6,
    "held": 4,
}


@dataclass
class Stopping:
    """An engine that stops after some cells, as a kill would."""

    after: int
    seen: list[str] = field(default_factory=list)

    def run(
        self, fn: Callable[[Any], Any], tasks: Sequence[Any], retries: int = 0
    ) -> Iterator[Outcome]:
        for index, task in enumerate(tasks):
            if len(self.seen) == self.after:
                raise KeyboardInterrupt
            self.seen.append(task.key)
            yield Outcome(index, fn(task))


def test_a_plan_multiplies_the_lists():
    sweep = Sweep(
        **{
            **SMALL,
            "seeds": (0, 1),
            "tasks": ("ioi", "induction"),
            "revisions": ("a", "b"),
        }
    )
    cells = sweep.cells()
    assert len(cells) == len({cell.key for cell in cells}) == 16
    assert [cell.model for cell in cells] == ["embedded"] * 16
    # A cell is the same cell in another sweep of the same settings.
    other = Sweep(**{**SMALL, "name": "more", "revisions": ("a",)})
    assert {cell.key for cell in other.cells()} <= {cell.key for cell in cells}
    changed = Sweep(**{**SMALL, "n": 7, "revisions": ("a",)})
    assert not {cell.key for cell in changed.cells()} & {cell.key for cell in cells}


def test_a_sweep_is_read_from_toml(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'models = ["embedded"]\ntasks = "ioi"\nmethods = ["eap-ig"]\nn = 5\n'
    )
    sweep = Sweep.from_toml(path)
    assert (sweep.name, sweep.tasks, sweep.methods, sweep.n) == (
        "mine",
        ("ioi",),
        ("eap_ig",),
        5,
    )
    for text, code in (
        ("models = [", "sweep_unreadable"),
        ('models = ["x"]', "sweep_invalid"),
        ('models = ["x"]\ntasks = ["ioi"]\nmetod = 1', "sweep_invalid"),
        ('models = ["x"]\ntasks = ["ioi"]\nmethods = ["magic"]', "sweep_invalid"),
        ('models = []\ntasks = ["ioi"]', "sweep_invalid"),
    ):
        path.write_text(text)
        with pytest.raises(CircuitlabError) as refused:
            Sweep.from_toml(path)
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("field", "values"),
    [
        (
            "name",
            ["", "  ", ".", "..", "a/b", "../../evil", "a\\b", "a\nb", 5, "x" * 101],
        ),
        ("models", [[], [1], [""], ["a", "a"], {"a": 1}]),
        ("tasks", [[], [None], ["ioi", "ioi"]]),
        ("methods", [[], ["magic"], ["eap", 3], ["eap", "eap"], ["eap-ig", "eap_ig"]]),
        ("seeds", [[], ["x"], [-1], [0.5], [True], [0, 0]]),
        ("revisions", [[], [1], [None, None]]),
        (
            "sizes",
            [[], ["a"], [float("nan")], [float("inf")], [20.7], [-1], [20, 20.0]],
        ),
        ("thresholds", [[], [-0.1], ["0.1"], [float("nan")], [0.1, 0.1]]),
        ("sparsities", [[], [-1.0], [None]]),
        ("n", [0, 2.5, "16", True, None]),
        ("held", [0, True]),
        ("steps", [0, 2.5]),
        ("fraction", [0, 7, "x", float("nan")]),
        ("metric", ["magic", 1]),
        ("acdc_metric", ["custom"]),
        ("ablation", ["pathc", None]),
        ("rank", ["mag"]),
        ("dtype", ["float99", "int8", 32]),
        ("device", ["", 0]),
    ],
)
def test_settings_are_checked_before_anything_runs(field, values):
    for value in values:
        with pytest.raises(CircuitlabError) as refused:
            Sweep(**{**SMALL, field: value})
        assert refused.value.code == "sweep_invalid"
        assert refused.value.fields["field"] == field
        assert refused.value.fields["expected"]


def test_settings_have_one_spelling():
    one = Sweep(**{**SMALL, "sizes": [20, 0.5], "methods": "eap-ig", "n": np.int64(6)})
    other = Sweep(**{**SMALL, "sizes": (20.0, 0.5), "methods": ("eap_ig",)})
    assert one.digest == other.digest
    assert [c.key for c in one.cells()] == [c.key for c in other.cells()]


def test_a_sweep_runs_stores_and_sums_up(tmp_path):
    sweep, path = Sweep(**SMALL), tmp_path / "store.duckdb"
    seen: list[tuple[int, int]] = []
    found = run_sweep(sweep, path, report=lambda p: seen.append((p.done, p.total)))
    assert seen == [(1, 2), (2, 2)]
    assert not found.failures
    rows = found.summary.rows.to_pylist()
    assert [(r["method"], r["setting"], r["value"]) for r in rows] == [
        ("eap", "size", 20.0),
        ("eap", "size", 0.5),
        ("acdc", "threshold", 0.5),
        ("acdc", "threshold", 0.05),
    ]
    assert rows[3]["n_edges"] >= rows[2]["n_edges"]
    assert all(r["faithfulness"] is not None for r in rows)
    folder = tmp_path / "sweeps" / "small"
    assert (folder / "summary.csv").read_text().count("\n") == 5
    assert (folder / "summary.svg").read_text().count("<circle") == 4
    with Store(path) as store:
        tagged = store.runs(tag="sweep:small")["run_id"].to_pylist()
        kinds = store.runs()["kind"].to_pylist()
        circuit = store.load(found.run_ids[-2])
    assert set(tagged) == set(found.run_ids)
    assert kinds.count("eval") == 2
    assert circuit.provenance["selector"] == "acdc"
    # What stands in the summary is what evaluating that circuit gives.
    model = cl.load_model("embedded")
    prompts = cl.tasks.induction(n=10, seed=0, model=model)
    _, held = prompts.split(6, seed=0)
    again = cl.evaluate(model, held, cl.logit_diff(), circuit)
    assert again.faithfulness == pytest.approx(rows[3]["faithfulness"], abs=1e-5)


def test_a_killed_sweep_goes_on_and_nothing_is_done_twice(tmp_path):
    sweep, path = Sweep(**{**SMALL, "seeds": (0, 1)}), tmp_path / "store.duckdb"
    first = Stopping(after=1)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, path, engine=first)
    second = Stopping(after=99)
    found = run_sweep(sweep, path, engine=second)
    assert found.resumed == 1
    assert sorted(first.seen + second.seen) == sorted(c.key for c in sweep.cells())
    whole = run_sweep(sweep, tmp_path / "other" / "store.duckdb")
    dropped = found.summary.rows.drop_columns(["seconds"])
    assert dropped.equals(whole.summary.rows.drop_columns(["seconds"]))
    third = Stopping(after=0)
    assert run_sweep(sweep, path, engine=third).resumed == 4
    with Store(path) as store:
        ids = store.runs()["run_id"].to_pylist()
    assert len(ids) == len(set(ids)) == len(set(found.run_ids))
    with pytest.raises(CircuitlabError) as refused:
        run_sweep(Sweep(**{**SMALL, "n": 7}), path)
    assert refused.value.code == "checkpoint_mismatch"
    # A kill between the saves and the step repeats the cells, and saves nothing new.
    steps = tmp_path / "sweeps" / "small" / "steps.jsonl"
    steps.write_bytes(steps.read_bytes().partition(b"\n")[0] + b"\n")
    repeated = run_sweep(sweep, path)
    assert (repeated.resumed, set(repeated.run_ids)) == (0, set(found.run_ids))
    with Store(path) as store:
        assert sorted(store.runs()["run_id"].to_pylist()) == sorted(ids)


def test_a_store_that_lacks_the_runs_gets_them(tmp_path):
    sweep = Sweep(**{**SMALL, "methods": ("eap",)})
    first = run_sweep(sweep, tmp_path / "a.duckdb")
    second = run_sweep(sweep, tmp_path / "b.duckdb")
    assert (second.resumed, second.run_ids) == (0, first.run_ids)
    with Store(tmp_path / "b.duckdb") as store:
        assert set(store.runs()["run_id"].to_pylist()) == set(first.run_ids)
    for name in ("a.duckdb", "b.duckdb"):
        assert run_sweep(sweep, tmp_path / name, engine=Stopping(0)).resumed == 1


def test_a_sweep_runs_once_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "WAIT", 0.1)
    sweep, path = Sweep(**{**SMALL, "methods": ("eap",)}), tmp_path / "store.duckdb"
    codes = []

    def meanwhile(progress: Any) -> None:
        with pytest.raises(CircuitlabError) as refused:
            run_sweep(sweep, path)
        codes.append(refused.value.code)

    assert not run_sweep(sweep, path, report=meanwhile).failures
    assert codes == ["checkpoint_held"]


@pytest.mark.parametrize(
    ("store", "folder", "code"),
    [
        ("junk", "good", "store_not_duckdb"),
        ("junk/store.duckdb", "good", "store_path_invalid"),
        ("/proc/none/store.duckdb", "good", "store_not_writable"),
        ("store.duckdb", "junk/steps", "checkpoint_unusable"),
    ],
)
def test_places_are_tried_before_anything_is_computed(tmp_path, store, folder, code):
    (tmp_path / "junk").write_text("no store")
    with pytest.raises(CircuitlabError) as refused:
        run_sweep(
            Sweep(**SMALL),
            tmp_path / store,
            folder=tmp_path / folder,
            engine=Stopping(0),
        )
    assert refused.value.code == code


def test_sizes_that_a_model_is_too_small_for_are_left_out(tmp_path):
    sweep = Sweep(**{**SMALL, "methods": ("eap",), "sizes": (20, 500)})
    found = run_sweep(sweep, tmp_path / "store.duckdb")
    assert not found.failures
    assert found.summary.rows["value"].to_pylist() == [20.0]
    assert [row["sizes"] for row in found.left_out] == [[500.0]]
    with Store(tmp_path / "store.duckdb") as store:
        assert store.runs(kind="edge").num_rows == 1
    assert run_sweep(sweep, tmp_path / "store.duckdb").left_out == found.left_out
    sweep = Sweep(**{**SMALL, "name": "large", "methods": ("exact",), "sizes": 500})
    failed = run_sweep(sweep, tmp_path / "store.duckdb")
    assert [row["code"] for row in failed.failures] == ["size_out_of_range"]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    """Twenty prompt pairs of the embedded model."""
    model = cl.load_model("embedded")
    prompts = cl.tasks.induction(n=20, seed=5, model=model)
    path = tmp_path / "pairs.jsonl"
    names = ("clean", "corrupted", "answer_texts", "wrong_answer_texts")
    rows = prompts.table.select(names).rename_columns(
        ["clean", "corrupted", "answer", "wrong_answer"]
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    return str(path)


def test_a_seed_draws_among_all_rows_of_a_file(prompt_file):
    model = cl.load_model("embedded")
    sweep = Sweep(**{**SMALL, "tasks": prompt_file, "methods": "eap", "seeds": (0, 1)})
    drawn = [cell_prompts(cell, model) for cell in sweep.cells()]
    for scored, held in drawn:
        assert (len(scored), len(held)) == (6, 4)
        assert not set(scored.clean) & set(held.clean)
    sets = [{*scored.clean, *held.clean} for scored, held in drawn]
    assert sets[0] != sets[1]


def test_a_file_of_too_few_prompts_is_refused_at_once(prompt_file, tmp_path):
    sweep = Sweep(**{**SMALL, "tasks": prompt_file, "n": 15, "held": 6})
    with pytest.raises(CircuitlabError) as refused:
        run_sweep(sweep, tmp_path / "store.duckdb", engine=Stopping(0))
    assert refused.value.code == "prompts_too_few"
    assert refused.value.fields["expected"] == 21
    with pytest.raises(CircuitlabError) as refused:
        Sweep(**{**SMALL, "tasks": "none.jsonl"}).cells()
    assert refused.value.code == "prompts_file_missing"


def test_a_file_that_was_edited_is_not_mixed_with_what_it_was(prompt_file, tmp_path):
    settings = {**SMALL, "tasks": prompt_file, "methods": ("eap",), "seeds": (0, 1)}
    sweep, path = Sweep(**settings), tmp_path / "store.duckdb"
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, path, engine=Stopping(1))
    planned = sweep.cells()[0]
    lines = Path(prompt_file).read_text().splitlines(keepends=True)
    Path(prompt_file).write_text("".join(lines[1:]))
    with pytest.raises(CircuitlabError) as refused:
        run_sweep(sweep, path)
    assert refused.value.code == "checkpoint_mismatch"
    assert "files" in str(refused.value)
    with pytest.raises(CircuitlabError) as refused:
        run_cell(planned)
    assert refused.value.code == "prompts_file_changed"
    assert sweep.cells()[0].key != planned.key


def test_failures_are_recorded_and_the_sweep_goes_on(tmp_path):
    sweep = Sweep(
        **{**SMALL, "tasks": ("induction", "no_such_task"), "methods": ("eap",)}
    )
    found = run_sweep(sweep, tmp_path / "store.duckdb", retries=1)
    assert found.summary.rows.num_rows == 2
    assert [failure["task"] for failure in found.failures] == ["no_such_task"]
    assert found.failures[0]["code"] == "task_unknown"
    again = run_sweep(sweep, tmp_path / "store.duckdb")
    assert again.resumed == 1
    assert len(again.failures) == 1


def test_every_method_gives_circuits():
    sweep = Sweep(**{**SMALL, "methods": METHODS, "sizes": (30,), "n": 3, "held": 2})
    for cell in sweep.cells():
        if cell.method == "edge_mask":
            continue
        result = run_cell(cell)
        assert result.rows, cell.method
        assert all(row["n_edges"] >= 0 for row in result.rows)


def test_a_plan_is_estimated():
    sweep = Sweep(**{**SMALL, "methods": ("eap", "eap_ig", "exact", "acdc")})
    rows = estimate(sweep).to_pylist()
    cost = {row["method"]: row["forwards"] for row in rows}
    assert cost["eap"] < cost["eap_ig"] < cost["exact"] < cost["acdc"]
    assert all(row["seconds"] > 0 for row in rows)


@pytest.mark.parametrize("asked", ["--plan", "--estimate"])
def test_the_command_says_what_would_run(asked, tmp_path, capsys):
    path = tmp_path / "small.toml"
    path.write_text('models = "embedded"\ntasks = "induction"\nn = 4\nheld = 2\n')
    assert cli.run(["sweep", str(path), asked, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["task"], row["method"]) == ("induction", "eap_ig")
    assert ("seconds" in row) == (asked == "--estimate")
    assert not (tmp_path / "sweeps").exists()


def test_the_script_refuses_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["sweep_acdc.py", "--name", "../evil", "--plan"])
    assert sweep_acdc.main() == 2
    assert capsys.readouterr().err.startswith("sweep_invalid: name is '../evil'")


@dataclass(frozen=True)
class Dying:
    """An engine whose workers run `dying_cell`."""

    engine: Any
    marker: Path

    def run(self, fn: Any, tasks: Any, retries: int = 2) -> Iterator[Outcome]:
        assert fn is run_cell
        dying = partial(dying_cell, str(self.marker))
        return self.engine.run(dying, tasks, retries)


def check_death(engine: Any, tmp_path: Path) -> None:
    sweep = Sweep(**{**SMALL, "methods": ("eap",), "seeds": (0, 1, 2)})
    path = tmp_path / "store.duckdb"
    found = run_sweep(sweep, path, engine=Dying(engine, tmp_path / "died"))
    assert not found.failures
    assert (tmp_path / "died").exists()
    assert found.summary.rows.num_rows == 6
    with Store(path) as store:
        assert store.runs(kind="eval").num_rows == 3
    alone = run_sweep(sweep, tmp_path / "alone" / "store.duckdb", engine=Serial())
    assert set(alone.run_ids) == set(found.run_ids)


@pytest.mark.slow
def test_a_sweep_outlives_a_killed_process(tmp_path):
    check_death(Processes(2), tmp_path)


@pytest.mark.ray
def test_a_sweep_outlives_a_killed_ray_worker(tmp_path):
    pytest.importorskip("ray")
    check_death(Ray(workers=2), tmp_path)
