"""Prompt files: CSV, JSONL or Parquet rows, read and checked, as plain strings."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from circuitlab.errors import DataError

COLUMNS = ("clean", "corrupted", "answer", "wrong_answer")

Row = tuple[str, str, tuple[str, ...], tuple[str, ...]]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield (clean, corrupted, answers, wrong answers) of every row.

    Raises DataError `prompts_file_missing`, `prompts_file_unreadable`,
    `prompts_column_missing`, `prompts_row_invalid`.
    """
    if not path.is_file():
        raise DataError(
            "prompts_file_missing",
            f"there is no file {path}; give a CSV, JSONL or Parquet file of prompts",
            value=str(path),
        )
    readers = {".csv": _csv, ".jsonl": _jsonl, ".ndjson": _jsonl, ".parquet": _parquet}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unreadable(path, f"its ending {path.suffix!r} is none of the known")
    try:
        rows = reader(path)
    except (UnicodeDecodeError, csv.Error, pa.ArrowException, OSError) as error:
        raise _unreadable(path, str(error)) from error
    for number, row in enumerate(rows):
        yield _checked(row, path, number)


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        "prompts_file_unreadable",
        f"{path} can't be read as prompts: {why}; write CSV (.csv), one JSON object a "
        "line (.jsonl) or Parquet (.parquet)",
        value=str(path),
        reason=why,
        expected=[".csv", ".jsonl", ".parquet"],
    )


def _csv(path: Path) -> list[dict]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        _require_columns(reader.fieldnames or (), path)
        rows = list(reader)
    for row in rows:
        for name in ("answer", "wrong_answer"):
            row[name] = _json_list(row[name])
    return rows


def _json_list(cell: str | None) -> object:
    """A CSV cell that is a JSON list is a list; anything else is literal text."""
    if cell is None or not cell.startswith("["):
        return cell
    try:
        return json.loads(cell)
    except json.JSONDecodeError:
        return cell


def _jsonl(path: Path) -> list[dict]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise _unreadable(path, f"line {number} is no JSON ({error})") from error
        if not isinstance(row, dict):
            raise _unreadable(path, f"line {number} is no JSON object")
        _require_columns(row, path, f"line {number} of ")
        rows.append(row)
    return rows


def _parquet(path: Path) -> list[dict]:
    found = pq.ParquetFile(path).schema_arrow.names
    _require_columns(found, path)
    return pq.read_table(path, columns=list(COLUMNS)).to_pylist()


def _require_columns(found: object, path: Path, where: str = "") -> None:
    found = list(found)  # type: ignore[call-overload]
    missing = [name for name in COLUMNS if name not in found]
    if missing:
        raise DataError(
            "prompts_column_missing",
            f"{where}{path} has no column {', '.join(missing)}; it has "
            f"{', '.join(map(str, found)) or 'none'}, and needs {', '.join(COLUMNS)}",
            value=found,
            missing=missing,
            expected=list(COLUMNS),
        )


def _checked(row: dict, path: Path, number: int) -> Row:
    for name in ("clean", "corrupted"):
        if not isinstance(row[name], str) or not row[name]:
            raise _invalid(path, number, name, row[name], "a text")
    return (
        row["clean"],
        row["corrupted"],
        _texts(row, "answer", path, number),
        _texts(row, "wrong_answer", path, number),
    )


def _texts(row: dict, name: str, path: Path, number: int) -> tuple[str, ...]:
    value = row[name]
    texts = [value] if isinstance(value, str) else value
    good = isinstance(texts, list) and all(isinstance(t, str) and t for t in texts)
    if not good or not texts:
        raise _invalid(path, number, name, value, "a text or a list of texts")
    return tuple(texts)


def _invalid(
    path: Path, number: int, name: str, value: object, expected: str
) -> DataError:
    return DataError(
        "prompts_row_invalid",
        f"{path}, row {number}: {name} is {value!r}, expected {expected}",
        row=number,
        column=name,
        value=value,
        expected=expected,
    )
