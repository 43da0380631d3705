"""Fixtures of the app's tests: stores, and pages run without a browser."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import streamlit as st
from stores import fill
from streamlit.testing.v1 import AppTest

APP = Path(__file__).parents[2] / "app"
TIMEOUT = 30

# The pages' own modules, as Streamlit finds them beside main.py.
sys.path.insert(0, str(APP))

Open = Callable[..., AppTest]


@pytest.fixture(autouse=True)
def _no_stale_caches():
    st.cache_data.clear()
    st.cache_resource.clear()


@pytest.fixture(scope="session")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A store with one of everything, and its run ids by name. Not to be changed."""
    path = tmp_path_factory.mktemp("store") / "circuitlab.duckdb"
    return path, fill(path)


@pytest.fixture
def ids(filled: tuple[Path, dict[str, str]]) -> dict[str, str]:
    return filled[1]


@pytest.fixture
def own_store(
    filled: tuple[Path, dict[str, str]], tmp_path: Path
) -> tuple[Path, dict[str, str]]:
    """A store of this test's own, to be changed."""
    path = tmp_path / "own" / filled[0].name
    jobs = shutil.ignore_patterns("*.jobs")
    shutil.copytree(filled[0].parent, path.parent, ignore=jobs)
    return path, filled[1]


@pytest.fixture
def open_page(filled: tuple[Path, dict[str, str]], monkeypatch) -> Open:
    """Run a page on the filled store, or another, with query parameters."""

    def run(page: str, store: Path | None = None, **params: str) -> AppTest:
        monkeypatch.setenv("CIRCUITLAB_STORE", str(store or filled[0]))
        app = AppTest.from_file(str(APP / "main.py"), default_timeout=TIMEOUT)
        for name, value in params.items():
            app.query_params[name] = value
        app.switch_page(f"pages/{page}.py")
        return app.run()

    return run
