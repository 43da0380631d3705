"""Time the app in a real browser: first paint, slider, memory, against DESIGN's aims.

    python scripts/bench_app.py            # needs chromium and playwright

Stores are synthetic: one of 1,000 runs, and runs of 32,491 and 134,245 edges. Every
number is the median of several tries on the machine as it is; the first visit to a new
server is told apart, because it also fills the caches.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "app"))

from stores import GPT2, LARGE, edge_table, fill_many  # noqa: E402

from circuitlab.store import Store  # noqa: E402

ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]

# Move the slider by a step and wait for the frame in which the new picture stands.
SLIDE = """async (step) => {
    const host = [...document.querySelectorAll("*")].find(
        (e) => e.shadowRoot && e.shadowRoot.querySelector(".cv"));
    const slider = host.shadowRoot.querySelector(".size");
    const before = host.shadowRoot.querySelector(".sheet > svg");
    const start = performance.now();
    slider.value = Number(slider.value) + step;
    slider.dispatchEvent(new Event("input"));
    while (host.shadowRoot.querySelector(".sheet > svg") === before) {
        await new Promise(requestAnimationFrame);
    }
    await new Promise(requestAnimationFrame);
    const drawn = performance.now() - start;
    const url = location.href;
    slider.dispatchEvent(new Event("change"));
    while (location.href === url) await new Promise(requestAnimationFrame);
    return [drawn, performance.now() - start];
}"""


@contextmanager
def server(store: Path):
    """A running app; gives its address and process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "streamlit", "run", str(ROOT / "app" / "main.py"),
        "--server.port", str(port), "--", str(store),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/_stcore/health", timeout=2).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url, process
    finally:
        process.terminate()
        process.wait(20)


def first_paint(page: Page, url: str, selector: str) -> float:
    """Seconds from the request until the thing itself is there."""
    started = time.perf_counter()
    page.goto(url)
    page.wait_for_selector(selector)
    return time.perf_counter() - started


def slide(page: Page, step: int) -> list[float]:
    """Milliseconds until the new picture, and until the server's answer, on a page that
    has come to rest."""
    page.wait_for_selector('[data-testid="stApp"][data-test-script-state="notRunning"]')
    page.wait_for_timeout(1000)
    return page.evaluate(SLIDE, step)


def memory(process: subprocess.Popen) -> float:
    """Resident memory of the server, MB."""
    status = Path(f"/proc/{process.pid}/status")
    if not status.exists():
        return float("nan")
    line = next(t for t in status.read_text().splitlines() if t.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def tell(what: str, value: str, aim: str = "") -> None:
    print(f"{what:<58} {value:>12}  {aim}")


def repeated(tries: int, measure: Callable[[], float]) -> tuple[float, float]:
    """The first try, and the median of the others."""
    first, *others = (measure() for _ in range(tries + 1))
    return first, statistics.median(others)


def bench_runs(page: Page, folder: Path, tries: int) -> None:
    path = folder / "many.duckdb"
    fill_many(path, 1000)
    with server(path) as (url, process):
        table = '[data-testid="stDataFrame"] canvas'
        first, later = repeated(tries, lambda: first_paint(page, url, table))
        tell("Runs, 1,000 runs: first paint, new server", f"{first:.2f} s")
        tell("Runs, 1,000 runs: first paint", f"{later:.2f} s", "aim 2 s")
        tell("server memory after that", f"{memory(process):.0f} MB")


def bench_circuit(page: Page, folder: Path, tries: int) -> None:
    path = folder / "big.duckdb"
    store = Store(path)
    runs = {
        "32,491": store.save(edge_table(GPT2)),
        "134,245": store.save(edge_table(LARGE)),
    }
    store.fold()
    with server(path) as (url, process):
        for size, run_id in runs.items():
            link = f"{url}/circuit?run={run_id}&k=1000"
            svg = '.sheet > svg[data-k="1000"]'
            first, later = repeated(tries, lambda: first_paint(page, link, svg))  # noqa: B023
            tell(f"Circuit of {size} edges: first paint, first visit", f"{first:.2f} s")
            tell(f"Circuit of {size} edges: first paint", f"{later:.2f} s", "aim 2 s")
            steps = [3, -6] * tries
            times = [slide(page, step) for step in steps]
            drawn = statistics.median(t[0] for t in times)
            whole = statistics.median(t[1] for t in times)
            tell("  slider to new picture", f"{drawn:.0f} ms", "aim 300 ms")
            tell("  slider to numbers and address from the server", f"{whole:.0f} ms")
        tell("server memory after that", f"{memory(process):.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=5)
    tries = parser.parse_args().tries
    chromium = shutil.which("chromium")
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.set_default_timeout(120_000)
        bench_runs(page, Path(folder), tries)
        bench_circuit(page, Path(folder), tries)
        browser.close()


if __name__ == "__main__":
    main()
