"""Jobs: started, followed, cancelled; with commands that load no model."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
import worker
from forms import keep_upload

from circuitlab.errors import ArgumentError

SLOW = "select sum(a.range * b.range) from range(10000000) a, range(10000000) b"


def wait(job: worker.Job, seconds: float = 60) -> str:
    deadline = time.monotonic() + seconds
    while job.state == "running" and time.monotonic() < deadline:
        time.sleep(0.1)
    return job.state


def begin(store: Path, *arguments: str) -> worker.Job:
    found = worker.job(str(store), worker.start(str(store), "a job", arguments))
    assert found is not None
    return found


def test_a_job_runs_to_its_end(filled):
    job = begin(filled[0], "runs")
    assert wait(job) == "done"
    listed = json.loads((job.folder / "out").read_text())
    assert {row["run_id"] for row in listed} == set(filled[1].values())
    assert worker.recent(str(filled[0]))[0].id == job.id
    assert job.run_id == ""


def test_a_failure_says_why(filled):
    job = begin(filled[0], "circuit", "feedfacefeed", "--top-k", "3")
    assert wait(job) == "failed"
    assert "run_unknown" in job.log()


def test_a_job_is_cancelled(filled):
    job = begin(filled[0], "sql", SLOW)
    deadline = time.monotonic() + 30
    while not (job.folder / "alive").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert job.state == "running"
    job.cancel()
    assert wait(job) == "cancelled"


def test_a_job_without_a_sign_of_life_is_lost(tmp_path):
    folder = tmp_path / "s.duckdb.jobs" / ("0" * 12)
    folder.mkdir(parents=True)
    facts = {"title": "x", "command": ["runs"], "started": time.time() - 100}
    (folder / "job.json").write_text(json.dumps(facts))
    (folder / "alive").touch()
    os.utime(folder / "alive", (0, 0))
    found = worker.job(str(tmp_path / "s.duckdb"), "0" * 12)
    assert found is not None
    assert found.state == "lost"


@pytest.mark.parametrize("name", ["..", "../x", "", "0" * 13, "000000000000/.."])
def test_a_jobs_id_is_no_path(filled, name):
    assert worker.job(str(filled[0]), name) is None


def test_the_log_is_what_a_terminal_shows(tmp_path):
    raw = "one\r\n\x1b[32mScoring\x1b[0m:  10%|#   | 1/10\rScoring:  40%|####| 4/10"
    (tmp_path / "log").write_bytes(raw.encode())
    job = worker.Job(tmp_path)
    assert job.log() == "one\nScoring:  40%|####| 4/10"
    assert job.progress == 0.4


def test_uploads_stay_in_their_folder(tmp_path):
    store = str(tmp_path / "s.duckdb")
    path = Path(keep_upload(store, "../../<b>.jsonl", b"{}"))
    assert path.parent == tmp_path / "s.duckdb.uploads"
    assert path.suffix == ".jsonl"
    assert path.read_bytes() == b"{}"
    with pytest.raises(ArgumentError, match="CSV, JSONL or Parquet"):
        keep_upload(store, "x.py", b"")
