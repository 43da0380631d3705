"""What the commands print: tables for people, JSON and CSV for programs, on stdout.

Whatever is no result (progress, remarks, errors) goes to stderr.
"""

from __future__ import annotations

import contextlib
import csv
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]


def say(text: str = "") -> None:
    """A line on stdout."""
    sys.stdout.write(text + "\n")


def remark(text: str) -> None:
    """A line on stderr: nothing that a program reads."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def print_json(value: object) -> None:
    """JSON with NaN and infinities as null: every reader takes it."""
    text = json.dumps(_finite(value), indent=2, ensure_ascii=False, default=str)
    say(text)


def print_csv(columns: Sequence[str], rows: Sequence[Row]) -> None:
    """CSV with a head; lists and mappings are JSON texts."""
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(row.get(name)) for name in columns] for row in rows)


def print_table(
    columns: Sequence[str], rows: Sequence[Row], title: str | None = None
) -> None:
    """A table; on a terminal it fits the width, in a pipe no cell is cut."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(
        file=sys.stdout, width=None if terminal else 1000, highlight=False
    )
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in columns:
        numbers = all(isinstance(row.get(name), int | float | None) for row in rows)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(row.get(name))) for name in columns))
    if terminal:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        say(line.rstrip())


def show(
    columns: Sequence[str],
    rows: Sequence[Row],
    *,
    as_json: bool = False,
    as_csv: bool = False,
    title: str | None = None,
) -> None:
    """Rows in the form that was asked for."""
    if as_json:
        print_json([{name: row.get(name) for name in columns} for row in rows])
    elif as_csv:
        print_csv(columns, rows)
    else:
        print_table(columns, rows, title)


def cell(value: object) -> str:
    """A value as a person reads it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return ", ".join("·" if item is None else cell(item) for item in value)
    return str(value)


@contextlib.contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr for what takes more than two seconds; none in a pipe or a log."""
    from tqdm import tqdm

    with tqdm(
        desc=label, total=1, delay=2, leave=False, disable=not sys.stderr.isatty()
    ) as bar:

        def advance(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield advance


def _csv_cell(value: object) -> object:
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
