"""How the house is built: imports go one way, names agree, what is documented exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

import circuitlab
from circuitlab.cli import app

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "circuitlab"

# A module (or folder) imports only what stands above it. Everything above TORCH, and the
# command line, loads neither torch nor transformer_lens. Below EDGES stand the edges of
# the program, which alone bring algorithms and the store together.
LISTED = """
    errors notices conditions sites patterns
    tables node_table select selector_text graph draw ranking
    circuit circuits interchange roc
    encoding prompt_files prompts tasks data methods checkpoint
    site_selection read_edges read_json read_table
    kept records run_rows folders spool migrations queries database folding
    stored_rows overlay share repair store
    TORCH
    norms gradients reductions
    backends
    site_info inventory
    metrics senders ablations receivers coupling wiring windows ablated_side circuit_pass circuit_run circuit_state
    donors verb values verbs sourced selections edits doors trace
    payloads payload_json plans sweeps interventions
    targets frozen measure read_rows reads
    qk combining score_sum nodes exact edges evaluate validate calibrate edge_mask
    acdc_trials acdc_search acdc
    EDGES
    engines distribute sweep_summary sweep_cells sweep_plan sweep
    cli_output cli_options cli_quiet cli_recipe cli_bench cli_score cli_circuit
    cli_compare cli_search cli_mask cli_nodes cli_rerun
    cli_sweep cli_sites cli_models cli_store cli_app cli_demo cli
"""
ORDER = [str(name) for name in LISTED.split()]

# Imported inside a function, where two modules are two halves of one thing.
LATE = {("select", "selector_text")}

STORE = ORDER[ORDER.index("kept") : ORDER.index("TORCH")]
SCIENCE = ORDER[ORDER.index("TORCH") + 1 : ORDER.index("EDGES")]
TABLES = ORDER[: ORDER.index("TORCH")]
FACES = [name for name in ORDER if name.startswith("cli")]


def unit(name: str) -> str:
    """A module's place in the order: its own, or its folder's."""
    return name.partition(".")[0]


@cache
def modules() -> dict[str, Path]:
    """Every module by its name without `circuitlab.`; the package itself is ``."""
    found = {}
    for path in sorted(SRC.rglob("*.py")):
        parts = list(path.relative_to(SRC).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(name: str) -> Iterator[tuple[str, int]]:
    """What a module imports of circuitlab (not for types alone), with the line."""
    tree = ast.parse(modules()[name].read_text(encoding="utf-8"))
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "circuitlab":
                    yield alias.name.partition(".")[2], node.lineno
        elif isinstance(node, ast.ImportFrom):
            package, _, inner = (node.module or "").partition(".")
            assert node.level == 0, f"{name}:{node.lineno} imports relatively"
            if package == "circuitlab":
                for alias in node.names:
                    deeper = f"{inner}.{alias.name}".strip(".")
                    yield (deeper if deeper in modules() else inner), node.lineno


def test_every_module_has_its_place_in_the_order():
    units = {unit(name) for name in modules()} - {""}
    unplaced = sorted(units - set(ORDER))
    gone = sorted(set(ORDER) - {"TORCH", "EDGES"} - units)
    assert not unplaced, f"enter in LISTED, below what they import: {unplaced}"
    assert not gone, f"take out of LISTED: {gone}"
    assert len(ORDER) == len(set(ORDER))


@pytest.mark.parametrize("name", sorted(modules()))
def test_imports_go_upward_only(name: str):
    place = unit(name)
    above = set(ORDER[: ORDER.index(place)]) if place else set()
    wrong = [
        f"line {line}: {other or 'circuitlab'}"
        for other, line in imports(name)
        if unit(other) not in above | {place} and (name, other) not in LATE
    ]
    assert not wrong


def test_algorithms_do_not_import_the_store():
    found = [
        (name, other)
        for name in modules()
        for other, _ in imports(name)
        if unit(name) in SCIENCE and unit(other) in STORE
    ]
    assert not found


def test_concrete_backends_are_imported_only_by_load_model():
    concrete = ("backends.transformer_lens", "backends.anatomy", "backends.nnsight")
    found = [
        (name, other)
        for name in modules()
        for other, _ in imports(name)
        if other in concrete and not name.startswith("backends")
    ]
    assert not found


def fresh(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_table_half_and_the_command_line_load_no_torch():
    names = ["circuitlab", *(f"circuitlab.{name}" for name in [*TABLES, *FACES])]
    code = (
        "import importlib, sys\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
        "    heavy = {'torch', 'transformer_lens', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, (name, heavy)\n"
    )
    assert fresh(code) == ""


def test_importing_circuitlab_imports_no_other_module_of_it():
    code = (
        "import circuitlab, sys; print([m for m in sys.modules if 'circuitlab.' in m])"
    )
    assert fresh(code) == "[]"


def public_imports() -> dict[str, str]:
    """The names that type checkers see, with their home."""
    tree = ast.parse((SRC / "__init__.py").read_text(encoding="utf-8"))
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
    )
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        (alias,) = node.names
        assert alias.asname == alias.name
        home = (node.module or "").partition(".")[2]
        found[alias.name] = home
    return found


def test_public_names_agree():
    homes = vars(circuitlab)["_HOMES"]
    assert public_imports() == homes
    assert set(circuitlab.__all__) == set(homes)
    assert set(circuitlab.__all__) <= set(dir(circuitlab))


@pytest.mark.parametrize("name", circuitlab.__all__)
def test_a_public_name_is_what_its_home_calls_so(name: str):
    place = public_imports()[name]
    home = importlib.import_module(f"circuitlab.{place or name}")
    expected = getattr(home, name) if place else home
    assert getattr(circuitlab, name) is expected


def test_a_module_called_as_a_function_does_not_hide_it():
    code = (
        "import circuitlab as cl, circuitlab.evaluate, circuitlab.acdc\n"
        "from circuitlab.evaluate import curve\n"
        "print(callable(cl.evaluate), callable(cl.acdc), cl.curve is curve)"
    )
    assert fresh(code) == "True True True"


def test_an_unknown_public_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'edge_score'"):
        circuitlab.edge_score  # noqa: B018


def commands() -> dict[str, Any]:
    """Every command by its words, `store fold`; groups without their own action too."""
    found = {}
    waiting = [("", typer.main.get_command(app))]
    while waiting:
        path, command = waiting.pop()
        found[path] = command
        for name, inner in getattr(command, "commands", {}).items():
            waiting.append((f"{path} {name}".strip(), inner))
    return found


def test_every_command_and_option_has_help():
    silent = [path for path, command in commands().items() if not command.help]
    silent += [
        f"{path} {parameter.name}"
        for path, command in commands().items()
        for parameter in command.params
        if not getattr(parameter, "help", None)
    ]
    assert not silent


def test_the_reference_of_the_commands_is_up_to_date():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        render = importlib.import_module("document_cli").render
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    written = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == render(), "run `make docs`"


def shown_commands() -> list[tuple[str, str]]:
    """Command lines in the code blocks of the README and the docs."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        for block in re.findall(
            r"^```(?:sh|bash|console|)\n(.*?)^```", text, re.MULTILINE | re.DOTALL
        ):
            lines = block.replace("\\\n", " ").splitlines()
            found += [(path.name, line.strip().removeprefix("$ ")) for line in lines]
    return found


def test_commands_that_the_docs_show_exist():
    wrong = []
    for page, line in shown_commands():
        if re.match(r"circuitlab\b", line) and not accepted(words_of(line)[1:]):
            wrong.append((page, line))
    assert not wrong


def words_of(line: str) -> list[str]:
    """A command line's words, without its remark."""
    text = line.partition(" #")[0]
    try:
        return shlex.split(text)
    except ValueError:  # a quoted text that goes on in the next line
        return text.split()


def accepted(words: list[str]) -> bool:
    """Whether there is a command of these words that has these options."""
    command = commands()[""]
    while words and words[0][0] not in "-[" and hasattr(command, "commands"):
        inner = command.commands.get(words[0])  # type: ignore[attr-defined]
        if inner is None:
            return bool(re.fullmatch(r"…|\.\.\.|COMMAND", words[0]))
        command, words = inner, words[1:]
    known = {"--help", "-h", "--debug", "--version"}
    for parameter in command.params:
        known |= {*parameter.opts, *parameter.secondary_opts}
    used = {word.partition("=")[0] for word in words if word.startswith("--")}
    return used <= known


def test_the_two_commands_of_the_readme_exist():
    first = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## ")[0]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in ("demo", "test"):
        assert f"make {target}" in first
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_links_between_pages_lead_somewhere():
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
    ]
    broken = [
        (page.name, target)
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not broken


def test_no_file_names_a_package_registry():
    hosts = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"))]
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    paths = [ROOT / name for name in listed.stdout.splitlines()]
    found = [
        str(path)
        for path in paths
        if path.suffix in {".py", ".md", ".toml", ".txt", ".sql", ""} and path.is_file()
        for host in hosts
        if host in path.read_text(encoding="utf-8", errors="ignore")
    ]
    assert not found
