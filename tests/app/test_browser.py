"""The app in a real browser: headless Chromium against a real server.

With CIRCUITLAB_SCREENSHOTS=FOLDER the pictures of docs/app.md are written there.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from xml.etree import ElementTree

import pytest
from PIL import Image, ImageStat
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright
from stores import GPT2, LARGE, busy_heads, curve_of, edge_table, fill, prompts

from circuitlab.circuits import top_k
from circuitlab.store import Store

pytestmark = pytest.mark.browser

PAGES = ["", "circuit", "validate", "reads", "compare", "sweeps", "sql", "new_run"]
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
READY = '[data-testid="stApp"][data-test-script-state="notRunning"]'
PATIENCE = 60_000

Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        if "browser" in os.environ.get("CIRCUITLAB_REQUIRE", ""):
            pytest.fail("Chromium is required here: apt-get install chromium")
        pytest.skip("no Chromium on this machine")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        yield found
        found.close()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> tuple[Path, dict[str, str]]:
    path = tmp_path_factory.mktemp("browser") / "circuitlab.duckdb"
    ids = fill(path)
    held = Store(path)
    shown = edge_table(GPT2, model="gpt2", task="ioi", digest=prompts().digest)
    ids["gpt2"] = held.save(shown)
    other = edge_table(GPT2, 1, model="gpt2", method="eap", digest=prompts().digest)
    ids["gpt2b"] = held.save(other)
    sizes = [100, 200, 400, 800, 1600, 3200, 6400]
    ids["gpt2curve"] = held.save(curve_of(shown, sizes))
    ids["large"] = held.save(edge_table(LARGE, model="large"))
    held.tag(ids["gpt2"], "paper")
    held.fold()
    return path, ids


@pytest.fixture(scope="module")
def address(store) -> Iterator[str]:
    """A server as `circuitlab app` starts it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = "from circuitlab.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        program,
        "app",
        "--no-browser",
        "--port",
        str(port),
    ]
    command += ["--store", str(store[0])]
    server = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2):
                break
        except OSError:
            time.sleep(0.2)
    else:
        pytest.fail("the app did not answer")
    yield url
    # As Ctrl-C in a terminal does: the command and its server.
    os.killpg(server.pid, signal.SIGINT)
    server.wait(20)


@pytest.fixture
def visit(browser: Browser, address: str) -> Iterator[Visit]:
    """Open an address; asserts afterwards that nothing outside was asked for, and that
    no page showed an error."""
    contexts, outside, errors = [], [], []

    def asked(request: Request) -> None:
        local = (address, address.replace("http", "ws"), "data:", "blob:")
        if not request.url.startswith(local):
            outside.append(request.url)

    def open_page(path: str, **options) -> Page:
        context = browser.new_context(
            viewport={"width": 1440, "height": 900}, accept_downloads=True, **options
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("request", asked)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("dialog", lambda dialog: errors.append(dialog.message))
        go(page, f"{address}/{path}")
        return page

    yield open_page
    for context in contexts:
        for page in context.pages:
            errors += page.locator('[data-testid="stException"]').all_inner_texts()
        context.close()
    assert not outside
    assert not errors


def go(page: Page, url: str) -> None:
    page.goto(url)
    settled(page)


def settled(page: Page) -> None:
    page.wait_for_selector(READY)
    page.wait_for_timeout(100)
    page.wait_for_selector(READY)


def drawn(page: Page) -> int:
    return int(page.locator(".sheet > svg").get_attribute("data-drawn") or -1)


def wait_k(page: Page, k: int) -> None:
    page.wait_for_selector(f'.sheet > svg[data-k="{k}"]')


def wait_url(page: Page, pattern: str) -> None:
    page.wait_for_url(re.compile(pattern))
    settled(page)


def metric(page: Page, label: str) -> str:
    found = page.locator('[data-testid="stMetric"]', has_text=label).first
    return found.locator('[data-testid="stMetricValue"]').inner_text().strip()


def set_count(page: Page, k: int) -> None:
    field = page.locator(".count")
    field.fill(str(k))
    field.press("Enter")
    field.blur()
    wait_k(page, k)
    wait_url(page, rf"[?&]k={k}\b")


def shoot(page: Page, name: str) -> None:
    folder = os.environ.get("CIRCUITLAB_SCREENSHOTS")
    if folder:
        page.mouse.move(2, 2)
        page.wait_for_timeout(1500)
        taken = Image.open(io.BytesIO(page.screenshot()))
        # Few colours make small files, and the pages have few.
        small = taken.convert("RGB").quantize(256, kmeans=3, dither=Image.Dither.NONE)
        small.save(Path(folder) / f"{name}.png", optimize=True)


def click_edge(page: Page) -> None:
    """Click on the strongest edge that is somewhere covered by nothing."""
    at = page.locator(".edges").evaluate(
        """edges => {
            const root = edges.getRootNode();
            for (const path of [...edges.children].reverse()) {
                const matrix = path.getScreenCTM();
                for (let share = 0.1; share < 0.95; share += 0.05) {
                    const point = path.getPointAtLength(path.getTotalLength() * share);
                    const x = point.x * matrix.a + matrix.e;
                    const y = point.y * matrix.d + matrix.f;
                    if (root.elementFromPoint(x, y) === path) return [x, y];
                }
            }
        }"""
    )
    page.mouse.click(*at)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_opens(visit, page):
    opened = visit(page)
    assert opened.locator("h3").first.inner_text()


def test_a_slider_redraws_and_the_url_follows(visit, store):
    page = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    wait_k(page, 300)
    before = drawn(page)
    slider = page.locator(".size")
    slider.focus()
    for _ in range(8):
        slider.press("ArrowRight")
    page.wait_for_function(
        "k => document.querySelector('[data-testid=stApp]') && location.search.match(/k=(\\d+)/)"
        "?.[1] > k",
        arg=300,
    )
    settled(page)
    assert drawn(page) > before
    cut = page.locator(".cut")
    cut.focus()
    k = page.locator(".sheet > svg").get_attribute("data-k")
    for _ in range(30):
        cut.press("ArrowRight")
    settled(page)
    assert int(page.locator(".sheet > svg").get_attribute("data-k") or 0) < int(k or 0)


def test_an_answer_does_not_move_a_slider_back(visit, store):
    """The server answers one move while the next is under way."""
    page = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    wait_k(page, 300)
    slider = page.locator(".size")
    move = "(s, by) => { s.value = Number(s.value) + by; s.dispatchEvent(new Event('input')); }"
    rest = "s => s.dispatchEvent(new Event('change'))"
    slider.evaluate(move, 40)
    slider.evaluate(rest)
    slider.evaluate(move, 60)
    page.wait_for_function("() => !location.search.includes('k=300')")
    settled(page)
    under_way = page.locator(".sheet > svg").get_attribute("data-k")
    slider.evaluate(rest)
    wait_url(page, rf"k={under_way}\b")
    assert metric(page, "Edges") == f"{drawn(page):,}"


def test_browser_and_library_prune_alike(visit, store):
    page = visit(f"circuit?run={store[1]['gpt2']}&k=50")
    edges = edge_table(GPT2, model="gpt2", task="ioi", digest=prompts().digest)
    for k in (500, 1400):
        set_count(page, k)
        assert drawn(page) == len(top_k(edges, k))
        assert metric(page, "Edges") == f"{drawn(page):,}"


def test_components_and_edges_are_clicked(visit, store):
    page = visit(f"circuit?run={store[1]['first']}&k=60")
    head = busy_heads(edge_table(digest=prompts().digest), 60)[0]
    page.locator(f'.node[data-n="{head}"]').click()
    wait_url(page, f"sel={head}")
    expect(page.get_by_text("Edges out:")).to_be_visible()
    page.keyboard.press("Escape")
    page.wait_for_url(lambda url: "sel=" not in url)
    settled(page)
    click_edge(page)
    wait_url(page, r"sel=\S*(->|-%3E)")
    query = parse_qs(urlsplit(page.url).query)
    row = edge_table(digest=prompts().digest)[query["sel"][0]]
    assert float(metric(page, "Score")) == pytest.approx(row.score, rel=0.01)


def test_hide_undo_pin_and_group(visit, store):
    page = visit(f"circuit?run={store[1]['first']}&k=80")
    wait_k(page, 80)
    before = drawn(page)
    heads = busy_heads(edge_table(digest=prompts().digest), 80)
    page.locator(f'.node[data-n="{heads[0]}"]').click()
    page.locator(".tools .hide").click()
    wait_url(page, f"hide={heads[0]}")
    assert drawn(page) < before
    assert metric(page, "Edges") == str(drawn(page))
    page.locator(".tools .undo").click()
    page.wait_for_url(lambda url: "hide=" not in url)
    assert drawn(page) == before
    for name in heads[1:3]:
        page.locator(f'.node[data-n="{name}"]').click(modifiers=["Shift"])
    wait_url(page, rf"pins={heads[1]}(,|%2C){heads[2]}")
    page.locator(".tools .through").check()
    wait_url(page, r"through=1")
    page.locator(".tools .group").click()
    page.locator(".group-name").fill("<b>early</b>")
    page.locator(".group-name").press("Enter")
    wait_url(page, r"groups=")
    label = page.locator('.node[data-n^="group:"] text')
    assert label.inner_html() == "&lt;b&gt;early&lt;/b&gt;"


def test_a_link_shows_the_same(visit, store):
    page = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    set_count(page, 420)
    node = page.locator(".node").nth(4)
    name = node.get_attribute("data-n")
    node.click()
    wait_url(page, f"sel={name}")
    other = visit(page.url.rpartition("/")[2])
    wait_k(other, 420)
    assert drawn(other) == drawn(page)
    expect(other.get_by_text("Edges out:")).to_be_visible()


def test_back_and_forth(visit, store):
    page = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    set_count(page, 350)
    set_count(page, 500)
    page.go_back()
    wait_k(page, 350)
    page.go_back()
    wait_k(page, 300)
    page.go_forward()
    wait_k(page, 350)
    settled(page)
    assert metric(page, "Edges") == f"{drawn(page):,}"


def test_two_browsers_do_not_meet(visit, store):
    one = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    two = visit(f"circuit?run={store[1]['gpt2']}&k=300")
    set_count(one, 420)
    set_count(two, 700)
    wait_k(one, 420)
    assert drawn(one) < drawn(two)


def test_figures_are_files(visit, store, tmp_path):
    page = visit(f"circuit?run={store[1]['first']}&k=80")
    starts = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF-1.4"}
    for kind, start in starts.items():
        with page.expect_download() as found:
            page.locator(f".tools .{kind}").click()
        path = tmp_path / f"figure.{kind}"
        found.value.save_as(path)
        assert path.read_bytes().startswith(start)
    root = ElementTree.parse(tmp_path / "figure.svg").getroot()
    paths = [e for e in root.iter() if e.tag.endswith("path") and "data-i" in e.attrib]
    assert len(paths) == drawn(page)
    pdf = (tmp_path / "figure.pdf").read_bytes()
    assert pdf.rstrip().endswith(b"%%EOF")
    assert pdf.count(b" c\n") + pdf.count(b" c ") >= len(paths)


def test_a_circuit_is_exported(visit, store, tmp_path):
    page = visit(f"circuit?run={store[1]['first']}&k=40")
    page.get_by_text("Export", exact=True).click()
    with page.expect_download() as found:
        page.get_by_role("button", name=re.compile("^JSON")).click()
    found.value.save_as(tmp_path / "circuit.json")
    exported = json.loads((tmp_path / "circuit.json").read_text())
    kept = {e["edge"] if isinstance(e, dict) else e for e in _edges_in(exported)}
    assert kept == set(top_k(edge_table(digest=prompts().digest), 40).edges)


def _edges_in(exported: dict) -> list:
    circuit = exported.get("circuit", exported)
    return circuit["edges"]


def test_large_runs_are_cut_to_the_cap(visit, store):
    page = visit(f"circuit?run={store[1]['large']}&k=20000")
    wait_k(page, 20000)
    assert drawn(page) == 1500
    expect(page.locator(".said")).to_contain_text("raise the threshold")
    set_count(page, 300)
    assert drawn(page) == int(metric(page, "Edges").replace(",", ""))


def test_names_with_html_are_text(visit, store):
    for path in ("", "circuit", "compare"):
        page = visit(f"{path}?run={store[1]['nasty']}&runs={store[1]['nasty']}")
        assert page.locator('img[src="x"]').count() == 0
        assert page.locator("img[src*=outside]").count() == 0


def test_a_run_is_made_and_validated(visit, store):
    """On the embedded model, in worker processes, from the form to the curve."""
    page = visit("new_run")
    page.get_by_label("Prompts", exact=True).fill("8")
    page.get_by_label("Prompts", exact=True).press("Tab")
    page.get_by_role("button", name="Start").click()
    page.get_by_role("link", name="Open the circuit").click(timeout=180_000)
    wait_url(page, "/circuit")
    set_count(page, 40)
    shoot(page, "app-circuit-embedded")
    page.get_by_role("link", name="Validate", exact=True).last.click()
    wait_url(page, "/validate")
    page.get_by_role("button", name="Validate this circuit").click()
    expect(page.get_by_text("Saved: it is in the picture below.")).to_be_visible(
        timeout=180_000
    )
    expect(page.locator("table.cl")).to_contain_text("answer")
    assert float(metric(page, "Outside")) < 1
    runs = Store(store[0]).runs(model="embedded").to_pylist()
    assert sorted(run["kind"] for run in runs) == ["circuit", "edge", "eval"]
    assert {run["method"] for run in runs} == {"eap_ig", "validate"}
    shoot(page, "app-validate-embedded")


PICTURES = {
    "app-runs": "?text=gpt2",
    "app-circuit": "circuit?run={gpt2}&k=220",
    "app-component": "circuit?run={gpt2}&k=220&sel=a5.h5",
    "app-validate": "validate?run={gpt2}&k=1600",
    "app-compare": "compare?runs={gpt2},{gpt2b}&ck=180",
    "app-reads": "reads?run={gpt2}",
    "app-sweeps": "sweeps?s-model=gpt2",
    "app-sql": "sql?query=top_edges&p-run={gpt2}",
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures(visit, store, name):
    """Both themes draw; the pictures of the documentation are these."""
    path = PICTURES[name].format(**store[1])
    for scheme in ("light", "dark"):
        if scheme == "dark" and name != "app-circuit":
            continue
        page = visit(path, color_scheme=scheme)
        shoot(page, name if scheme == "light" else f"{name}-dark")
        seen = Image.open(io.BytesIO(page.screenshot())).convert("L")
        (brightness,) = ImageStat.Stat(seen).median
        assert brightness > 200 if scheme == "light" else brightness < 60
        # A page that drew nothing has its background and little else.
        assert max(seen.histogram()) < 0.98 * 1440 * 900
