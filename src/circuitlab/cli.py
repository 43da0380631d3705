"""The command line: thin commands over the library.

What needs torch is imported inside the commands, so that help and what only reads the
store answer at once. Results go to stdout, all else to stderr.

Exit codes: 0 done, 1 an unforeseen error, 2 an argument, data or a model that can't be
used, 3 a store that can't be used, 130 interrupted.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from circuitlab import (
    cli_app,
    cli_circuit,
    cli_compare,
    cli_demo,
    cli_mask,
    cli_models,
    cli_nodes,
    cli_rerun,
    cli_score,
    cli_search,
    cli_sites,
    cli_store,
    cli_sweep,
)
from circuitlab.cli_output import remark, say
from circuitlab.errors import CircuitlabError, InternalError, StoreError

app = typer.Typer(
    name="circuitlab",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

# Usage errors are click's; typer carries click under a name that varies by version.
ClickError: type[Exception] = typer.BadParameter.__mro__[2]


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        say(version("circuitlab"))
        raise typer.Exit()


@app.callback()
def circuitlab(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Find which edges between a language model's components carry a behaviour."""
    del debug, version  # read before parsing, and by its callback


app.command()(cli_demo.demo)
app.add_typer(cli_models.tasks_app, name="tasks")
app.command()(cli_score.score)
app.command()(cli_nodes.nodes)
app.command()(cli_score.combine)
app.command()(cli_circuit.circuit)
app.command()(cli_circuit.evaluate)
app.command()(cli_circuit.curve)
app.command()(cli_search.validate)
app.command()(cli_search.calibrate)
app.command()(cli_search.acdc)
app.command()(cli_mask.mask)
app.command()(cli_compare.compare)
app.command()(cli_sweep.sweep)
app.command()(cli_sites.sites)
app.command()(cli_sites.read)
app.command()(cli_sites.intervene)
app.command()(cli_rerun.rerun)
app.command()(cli_store.runs)
app.command()(cli_store.sql)
app.command()(cli_store.export)
app.command("import")(cli_store.import_)
app.add_typer(cli_store.store_app, name="store")
app.add_typer(cli_models.models_app, name="models")
app.command()(cli_models.doctor)
app.command("app")(cli_app.app)


def main() -> None:
    """The `circuitlab` program."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Run one command; return its exit code. An error is one line on stderr."""
    debug = "--debug" in arguments
    rest = [argument for argument in arguments if argument != "--debug"]
    try:
        code = app(rest, prog_name="circuitlab", standalone_mode=False)
        return _interrupted() if code == 130 else int(code or 0)
    except ClickError as error:
        return _usage(error)
    except (typer.Abort, KeyboardInterrupt):
        return _interrupted()
    except CircuitlabError as error:
        return _refusal(error, debug)
    except MemoryError as error:
        return _out_of_memory(error, debug)
    # A program's last line of defence: one line here too.
    except Exception as error:  # noqa: BLE001
        if type(error).__name__ == "OutOfMemoryError":
            return _out_of_memory(error, debug)
        if debug:
            traceback.print_exc()
        text = " ".join(str(error).split())
        remark(
            f"error[unexpected]: {type(error).__name__}: {text} (see it with --debug)"
        )
        return 1


def _interrupted() -> int:
    remark("interrupted; what was saved stays")
    return 130


def _usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "circuitlab"
    text = error.format_message() if hasattr(error, "format_message") else str(error)  # type: ignore[attr-defined]
    if text:
        remark(f"error[usage]: {' '.join(text.split())} (see {path} --help)")
    return 2


def _refusal(error: CircuitlabError, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    remark(f"error[{error.code}]: {' '.join(str(error).split())}")
    if isinstance(error, InternalError):
        return 1
    return 3 if isinstance(error, StoreError) else 2


def _out_of_memory(error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    remark(
        "error[out_of_memory]: there is not enough memory; run again with a smaller "
        f"--batch-size, fewer or shorter prompts, or --dtype bfloat16 ({error})"
    )
    return 1
