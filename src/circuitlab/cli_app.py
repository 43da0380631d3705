"""`circuitlab app`: start the circuit browser."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from circuitlab import cli_options as opt
from circuitlab.cli_bench import open_store
from circuitlab.errors import InternalError


def app(
    port: Annotated[int, typer.Option(help="Where it listens.")] = 8501,
    address: Annotated[
        str, typer.Option(help="On which address; this machine alone by default.")
    ] = "127.0.0.1",
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open a browser.")
    ] = True,
    store: opt.Store = None,
) -> None:
    """Open the circuit browser on a store.

    Runs until Ctrl-C. Browsing loads no model.

    Example: circuitlab app --port 8600
    """
    command = [
        sys.executable, "-m", "streamlit", "run", str(main_page()),
        "--server.address", address,
        "--server.port", str(port),
        "--server.headless", "false" if browser else "true",
        "--browser.gatherUsageStats", "false",
        "--runner.magicEnabled", "false",
        "--", open_store(store).path,
    ]  # fmt: skip
    with subprocess.Popen(command) as server:
        try:
            raise typer.Exit(server.wait())
        except KeyboardInterrupt:
            # A terminal sends Ctrl-C to both; a script, to this process alone.
            server.terminate()
            server.wait()
            raise


def main_page() -> Path:
    """The app's main page: in the wheel, or in a source checkout.

    Raises InternalError `app_files_missing`.
    """
    spec = importlib.util.find_spec("circuitlab")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    places = [package / "_app" / "main.py", package.parents[1] / "app" / "main.py"]
    for place in places:
        if place.is_file():
            return place
    raise InternalError(
        "app_files_missing",
        "the app's pages are missing; install circuitlab again",
        value=[str(place) for place in places],
    )
