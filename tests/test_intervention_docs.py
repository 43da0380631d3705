"""The pages on sites, gradients and interventions: their examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import circuitlab.interventions

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("sites", "gradients", "interventions")


def blocks(page: str, language: str) -> list[str]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_examples_of_a_page_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for text in blocks(page, "json"):
        Path("edits.json").write_text(text, encoding="utf-8")
    names: dict[str, object] = {}
    for code in blocks(page, "python"):
        exec(compile(code, f"docs/{page}.md", "exec"), names)
    assert names


def test_every_verb_and_door_is_on_the_page():
    text = (DOCS / "interventions.md").read_text(encoding="utf-8")
    functions = [
        name
        for name in circuitlab.interventions.__all__
        if name[0].islower() and name not in ("as_verb", "resolve_edits", "inventory")
    ]
    missing = [name for name in functions if f"{name}(" not in text]
    named_elsewhere = {"keep_grad", "intervene_each", "parse_payloads"}
    assert set(missing) <= named_elsewhere
