"""Sweeps are planned, resumed, retried and summed up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import circuitlab as cl
from circuitlab.engines import Outcome, Processes, Ray, Serial
from circuitlab.errors import CircuitlabError
from circuitlab.store import Store
from circuitlab.sweep import Sweep, estimate, run_cell, run_sweep
from circuitlab.sweep_cells import METHODS
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
