"""Write docs/cli.md from the commands themselves: python scripts/document_cli.py."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from circuitlab.cli import app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "cli.md"

HEAD = """\
# The command line

Written by `make docs` from the commands' own help; a test holds it up to date.

Results go to stdout, everything else (progress, remarks, errors) to stderr. `--json` and
`--csv` print nothing but data. An error is one line, `error[code]: what is wrong and what
to do`; `--debug`, anywhere on the line, shows where it came from.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | an unforeseen error, or something that `doctor` found |
| 2 | an argument, prompts or a model that can't be used |
| 3 | a store that can't be used, or a run that it doesn't have |
| 130 | interrupted with Ctrl-C |

Run and circuit ids may be given by their first six or more characters.
`CIRCUITLAB_STORE` names the store where `--store` does not.
"""


def render() -> str:
    """The whole page."""
    parts = [HEAD]
    for path, command in _commands("circuitlab", typer.main.get_command(app)):
        parts.append(_section(path, command))
    return "\n".join(parts)


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    if not inner or command.invoke_without_command:
        yield path, command
    for name, each in inner.items():
        yield from _commands(f"{path} {name}", each)


def _section(path: str, command: Any) -> str:
    about, _, example = inspect.cleandoc(command.help or "").partition("Example: ")
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    usage = " ".join([path, *(_metavar(p) for p in arguments)])
    usage += " [OPTIONS]" if options else ""
    lines = [f"## {path}", "", about.strip(), "", f"```\n{usage}\n```"]
    rows = [(f"`{_metavar(p)}`", p.help or "", "") for p in arguments]
    rows += [(_names(p), p.help or "", _default(p)) for p in options]
    if rows:
        lines += ["", "| | | default |", "|---|---|---|"]
        lines += ["| " + " | ".join(map(_cell, row)) + " |" for row in rows]
    if example:
        lines += ["", f"```sh\n{example.strip()}\n```"]
    return "\n".join(lines) + "\n"


def _metavar(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    name += "…" if parameter.nargs == -1 else ""
    return name if parameter.required else f"[{name}]"


def _names(parameter: Any) -> str:
    return ", ".join(f"`{name}`" for name in parameter.opts + parameter.secondary_opts)


def _default(parameter: Any) -> str:
    value = parameter.default
    if value is None or value is False or value == "" or callable(value):
        return ""
    return f"`{value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
