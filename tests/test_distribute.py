"""Engines give every outcome once, whatever dies; shards equal the whole."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import circuitlab as cl
from circuitlab.distribute import ModelSpec, metric_named, sharded_scores
from circuitlab.engines import Processes, Ray, Serial
from circuitlab.errors import CircuitlabError
from tests import distributed_tasks as tasks
from tests import read_models
from tests.test_acdc import pairs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model on the disk, as workers load it."""
    path = tmp_path_factory.mktemp("tiny")
    read_models.huggingface("gpt2").save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


@pytest.mark.parametrize("engine", [Serial(), Processes(workers=2)], ids=str)
def test_every_task_has_one_outcome(engine):
    found = list(engine.run(tasks.squared, [3, 1, 2]))
    assert sorted((o.index, o.value) for o in found) == [(0, 9), (1, 1), (2, 4)]
    assert all(o.ok and o.attempts == 1 for o in found)
    assert list(engine.run(tasks.squared, [])) == []


def check_death(engine: Any, folder: Path) -> None:
    work = [(number, str(folder)) for number in range(6)]
    found = list(engine.run(tasks.dies_once, work))
    assert sorted(o.index for o in found) == list(range(6))
    assert {o.index: o.value for o in found} == {i: i * 10 for i in range(6)}
    assert {o.index for o in found if o.attempts > 1} >= {2}
    done = (folder / "done").read_text().split()
    assert sorted(done) == sorted(str(number) for number in range(6))


def test_a_killed_process_is_replaced_and_nothing_runs_twice(tmp_path):
    check_death(Processes(workers=2), tmp_path)


@pytest.mark.ray
def test_a_killed_ray_worker_is_replaced_and_nothing_runs_twice(tmp_path, cluster):
    check_death(Ray(), tmp_path)
    assert cluster.is_initialized()


def test_retries_are_bounded():
    found = {o.index: o for o in Processes(2).run(tasks.always_dies, [0, 1, 2], 1)}
    assert found[0].ok
    assert found[2].ok
    assert not found[1].ok
    assert found[1].attempts == 2
    assert "died" in (found[1].error or "")


def test_a_worker_that_dies_while_nobody_looks_loses_no_task():
    found = []
    for outcome in Processes(2).run(tasks.dies_later, [0, 1, 2], 0):
        found.append(outcome)
        time.sleep(1)
    assert sorted((o.index, o.ok) for o in found) == [(0, True), (1, False), (2, True)]


DRIVER = """
from circuitlab.engines import Processes
from tests import distributed_tasks as tasks

if __name__ == "__main__":
    list(Processes(2).run(tasks.sleeps, [{folder!r}] * 2))
"""


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process with two busy workers, and their process ids."""
    folder, script = tmp_path / "pids", tmp_path / "driver.py"
    folder.mkdir()
    script.write_text(DRIVER.format(folder=str(folder)))
    root = Path(__file__).resolve().parent.parent
    process = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(root)},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    workers = [int(path.name) for path in folder.iterdir()]
    assert len(workers) == 2
    yield process, workers
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def ended(workers: list[int]) -> bool:
    """Wait until none of these processes runs any more."""
    deadline = time.monotonic() + 30
    while any(map(_runs, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(_runs, workers))


def _runs(pid: int) -> bool:
    state = ["ps", "-o", "stat=", "-p", str(pid)]
    found = subprocess.run(state, capture_output=True, text=True, check=False).stdout
    return found.strip() != "" and not found.startswith("Z")


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=str)
def test_workers_end_with_their_driver(driver, signum):
    process, workers = driver
    os.kill(process.pid, signum)
    assert ended(workers)


def test_an_interrupt_is_one_traceback_and_leaves_nothing(driver):
    process, workers = driver
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert ended(workers)
    assert said.count("Traceback") == 1  # the driver's own
    assert "leaked" not in said


@pytest.mark.parametrize("engine", [Serial(), Processes(workers=1)], ids=str)
def test_errors_are_tried_again_and_refusals_are_not(engine, tmp_path):
    work = [(number, str(tmp_path)) for number in range(3)]
    found = {o.index: o for o in engine.run(tasks.raises, work)}
    assert (found[0].code, found[0].attempts) == ("refused", 1)
    assert (found[1].value, found[1].attempts) == (1, 3)
    assert found[2].ok


@pytest.mark.parametrize("shards", [1, 3])
def test_sharded_scores_equal_the_unsharded(folder, shards):
    prompts = pairs(7)
    spec = ModelSpec(folder, dtype="float64")
    model = cl.load_model(folder, dtype="float64")
    whole = cl.edge_scores(model, prompts, cl.logit_diff(), method=cl.EAPIG(3))
    found = sharded_scores(
        spec,
        prompts,
        cl.logit_diff(),
        shards=shards,
        engine=Serial(),
        method=cl.EAPIG(3),
    )
    np.testing.assert_allclose(found.scores, whole.scores, rtol=0, atol=1e-12)
    stderr = [table.rows["stderr"].to_numpy() for table in (found, whole)]
    np.testing.assert_allclose(*stderr, rtol=0, atol=1e-12)
    assert set(found.rows["n"].to_pylist()) == {7}


@pytest.mark.slow
def test_shards_run_in_processes(folder):
    prompts, spec = pairs(4), ModelSpec(folder, dtype="float64")
    seen: list[tuple[int, int]] = []
    options = {"shards": 2, "engine": Processes(1)}
    found = sharded_scores(
        spec,
        prompts,
        cl.kl(),
        method=cl.EAPIG(2),
        progress=lambda done, total: seen.append((done, total)),
        **options,  # type: ignore[arg-type]
    )
    model = cl.load_model(folder, dtype="float64")
    whole = cl.edge_scores(model, prompts, cl.kl(), method=cl.EAPIG(2))
    np.testing.assert_allclose(found.scores, whole.scores, rtol=0, atol=1e-12)
    assert seen == [(1, 2), (2, 2)]


@pytest.mark.ray
def test_shards_run_on_ray(folder, cluster):
    prompts, spec = pairs(5), ModelSpec(folder, dtype="float64")
    found = sharded_scores(spec, prompts, cl.logit_diff(), shards=2, engine=Ray())
    model = cl.load_model(folder, dtype="float64")
    whole = cl.edge_scores(model, prompts, cl.logit_diff())
    np.testing.assert_allclose(found.scores, whole.scores, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"shards": 0}, "shards_out_of_range"),
        ({"shards": 9}, "shards_out_of_range"),
        ({"shards": 2.5}, "shards_out_of_range"),
        ({"shards": 2, "ablation": "mean"}, "ablation_not_shardable"),
        ({"shards": 2, "ablation": "resample"}, "ablation_not_shardable"),
    ],
)
def test_what_cannot_be_sharded_is_refused(folder, options, code):
    with pytest.raises(CircuitlabError) as refused:
        sharded_scores(folder, pairs(3), cl.logit_diff(), engine=Serial(), **options)
    assert refused.value.code == code


def test_a_shards_refusal_comes_through(folder):
    with pytest.raises(CircuitlabError) as refused:
        sharded_scores(folder, pairs(3), cl.kl(), shards=2, engine=Serial())
    assert refused.value.code == "metric_stationary_at_clean"
    with pytest.raises(CircuitlabError) as refused:
        metric_named("custom:x")
    assert refused.value.code == "metric_unknown"
    for metric, model, code in (
        ("kl", folder, "metric_invalid"),
        (cl.kl(), read_models.model(), "model_not_a_spec"),
    ):
        wrong: Any = (model, pairs(3), metric)
        with pytest.raises(CircuitlabError) as refused:
            sharded_scores(*wrong, shards=2, engine=Serial())
        assert refused.value.code == code


@pytest.mark.parametrize(
    ("made", "code"),
    [
        (lambda: Processes(0), "workers_out_of_range"),
        (lambda: Processes(2.5), "workers_out_of_range"),  # type: ignore[arg-type]
        (lambda: Processes(1, threads=0), "threads_out_of_range"),
        (lambda: Ray(workers=0), "workers_out_of_range"),
        (lambda: Ray(gpus=-1), "resources_out_of_range"),
        (lambda: list(Serial().run(abs, [1], -1)), "retries_out_of_range"),
    ],
)
def test_engines_that_cannot_be_are_refused(made, code):
    with pytest.raises(CircuitlabError) as refused:
        made()
    assert refused.value.code == code
