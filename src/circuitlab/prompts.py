"""Prompts: pairs of clean and corrupted token sequences, with the answers to compare.

This stage takes text or token ids and gives a PROMPT table. It knows a tokenizer only
by what it does to text, and neither torch nor a model. The ids that it holds are the
ids that run: where a BOS token is wanted it is already the first of them.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError, DataError, require_count, require_type
from circuitlab.prompt_files import read_rows
from circuitlab.tables import PROMPT, digest

if TYPE_CHECKING:
    import pandas

Ids = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompt pairs, one a row of `table` (schema `PROMPT`), in a fixed order.

    `prepend_bos` says whether a BOS token was put before each text (it is among the
    ids then). `tokenizer` is the digest of the vocabulary that made the ids, None where
    ids were given. `dropped` says what a task left out: (reason, count) pairs.
    """

    table: pa.Table = field(repr=False)
    name: str = "tokens"
    seed: int | None = None
    prepend_bos: bool = False
    tokenizer: str | None = None
    dropped: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        if self.table.schema.names != PROMPT.names:
            raise DataError(
                "prompt_table_schema_invalid",
                f"a prompt table has the columns {', '.join(PROMPT.names)}",
                value=self.table.schema.names,
                expected=PROMPT.names,
            )
        if self.table.num_rows == 0:
            raise DataError(
                "prompts_empty",
                f"{self.name}: there are no prompts; give at least one pair",
                name=self.name,
            )

    @staticmethod
    def from_tokens(
        clean: Any,  # whatever has rows of ids: tensors, arrays, lists
        corrupted: Any,
        answers: Any = None,
        wrong_answers: Any = None,
        *,
        name: str = "tokens",
    ) -> Prompts:
        """Build prompts from token ids.

        `clean` and `corrupted` are [n, pos] integer tensors or arrays, or lists of rows
        of any length (no padding). `answers` and `wrong_answers` give per example one
        id ([n]), a list or set of ids, or a list of answers of several ids each.
        Raises DataError `prompts_empty`, `prompt_tokens_invalid`, `prompt_counts_differ`.
        """
        rows = [_token_rows(clean, "clean"), _token_rows(corrupted, "corrupted")]
        n = len(rows[0])
        sets = [_answer_sets(answers, n), _answer_sets(wrong_answers, n)]
        for what, found in zip(_COUNTED, (*rows, *sets), strict=True):
            if len(found) != n:
                raise DataError(
                    "prompt_counts_differ",
                    f"there are {n} clean prompts but {len(found)} {what}; give one "
                    "per clean prompt",
                    value=len(found),
                    expected=n,
                    what=what,
                )
        columns = {
            "clean_tokens": rows[0],
            "corrupted_tokens": rows[1],
            "answers": sets[0],
            "wrong_answers": sets[1],
        }
        return Prompts(_table(columns, n), name)

    @staticmethod
    def from_texts(
        rows: Sequence[PromptText],
        encoder: Encoder,
        *,
        name: str = "texts",
        multi_token_answers: bool = False,
    ) -> Prompts:
        """Tokenise text pairs.

        Raises DataError `answer_not_single_token`, which shows the pieces and names the
        row; with `multi_token_answers` answers of any length pass (for the metric
        `answer_logprob`). Raises `prompts_row_invalid` for a prompt without text, and
        `prompt_words_unknown` where a word is outside the vocabulary.
        """
        found = [_encoded(row, i, encoder, multi_token_answers) for i, row in _n(rows)]
        columns = {key: [row[key] for row in found] for key in PROMPT.names[1:]}
        table = _table(columns, len(found))
        return Prompts(table, name, None, encoder.prepend_bos, encoder.digest)

    @staticmethod
    def from_file(
        path: str | Path,
        model: Any,  # anything with a tokenizer, or a tokenizer
        *,
        prepend_bos: bool | None = None,
        name: str | None = None,
        multi_token_answers: bool = False,
    ) -> Prompts:
        """Read prompt pairs from a CSV, JSONL or Parquet file.

        Columns `clean`, `corrupted`, `answer`, `wrong_answer`; others are ignored. An
        answer is a string, or a list of them (in CSV a JSON list): a set of right, or
        wrong, answers. Text is taken literally: a leading space counts.
        `prepend_bos=None` does what a freshly loaded tokenizer does to plain text.

        Pairs whose lengths differ are kept: only patch ablation needs equal lengths,
        and it calls `require_equal_lengths`.

        Raises DataError `prompts_file_missing`, `prompts_file_unreadable`,
        `prompts_column_missing`, `prompts_row_invalid`, `prompts_empty`,
        `answer_not_single_token`, `prompt_words_unknown`; ArgumentError
        `tokenizer_missing`, `bos_token_missing`.
        """
        encoder = Encoder.of(model, prepend_bos)
        rows = [PromptText(*row) for row in read_rows(Path(path))]
        label = name or Path(path).stem
        if not rows:
            raise DataError(
                "prompts_empty", f"{path} holds no prompts", value=str(path), name=label
            )
        return Prompts.from_texts(
            rows, encoder, name=label, multi_token_answers=multi_token_answers
        )

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, rows: slice) -> Prompts:
        """A slice of the prompts, as prompts."""
        if not isinstance(rows, slice):
            raise ArgumentError(
                "prompts_index_invalid",
                f"prompts are sliced: write prompts[{rows}:{rows} + 1]",
                value=repr(rows),
            )
        return self.take(range(len(self))[rows])

    def take(self, rows: Iterable[int]) -> Prompts:
        """The prompts at these positions, in this order, renumbered from 0."""
        table = self.table.take(pa.array(list(rows), pa.int64()))
        numbers = pa.array(range(table.num_rows), pa.int32())
        return replace(self, table=table.set_column(0, PROMPT.field(0), numbers))

    def split(self, n: int, seed: int = 0) -> tuple[Prompts, Prompts]:
        """Shuffle by `seed`; return the first `n` and the rest.

        Score on one and evaluate on the other. Raises ArgumentError
        `prompts_k_out_of_range` unless both parts hold at least one prompt.
        """
        if not 0 < n < len(self):
            raise ArgumentError(
                "prompts_k_out_of_range",
                f"{n} of {len(self)} prompts can't be split off; choose 1 to "
                f"{len(self) - 1}, or make more prompts",
                value=n,
                expected=f"1..{len(self) - 1}",
            )
        seed = require_count("seed_invalid", "seed", seed, least=0)
        order = np.random.default_rng(seed).permutation(len(self)).tolist()
        return self.take(order[:n]), self.take(order[n:])

    def batches(self, size: int) -> Iterator[Prompts]:
        """Consecutive prompts, at most `size` at a time.

        Raises ArgumentError `batch_size_invalid` for a size below 1.
        """
        size = require_count("batch_size_invalid", "size", size)
        for start in range(0, len(self), size):
            yield self[start : start + size]

    @cached_property
    def clean(self) -> tuple[Ids, ...]:
        """Token ids of every clean prompt."""
        return tuple(tuple(row) for row in self.table["clean_tokens"].to_pylist())

    @cached_property
    def corrupted(self) -> tuple[Ids, ...]:
        """Token ids of every corrupted prompt."""
        return tuple(tuple(row) for row in self.table["corrupted_tokens"].to_pylist())

    @cached_property
    def answers(self) -> tuple[tuple[Ids, ...], ...]:
        """Per example its right answers, each a tuple of token ids (mostly of one)."""
        return _nested(self.table["answers"])

    @cached_property
    def wrong_answers(self) -> tuple[tuple[Ids, ...], ...]:
        """Per example its wrong answers, each a tuple of token ids (mostly of one)."""
        return _nested(self.table["wrong_answers"])

    @cached_property
    def digest(self) -> str:
        """The dataset digest: tokens, answers and BOS; no names and no seed."""
        return digest(
            self.clean,
            self.corrupted,
            self.answers,
            self.wrong_answers,
            self.prepend_bos,
        )

    def require_equal_lengths(self) -> None:
        """Raise DataError `prompt_lengths_differ`, naming the row, unless pairs align.

        Patch ablation takes the corrupted run's value at the same position, so both
        prompts of a pair need as many tokens.
        """
        for row, (clean, corrupted) in _n(zip(self.clean, self.corrupted, strict=True)):
            if len(clean) != len(corrupted):
                raise DataError(
                    "prompt_lengths_differ",
                    f"{self.name}, prompt {row}: clean has {len(clean)} tokens and "
                    f"corrupted {len(corrupted)}; make them equally long, or use zero "
                    "or mean ablation",
                    row=row,
                    clean=len(clean),
                    corrupted=len(corrupted),
                )

    def overlaps(self, other: Prompts) -> int:
        """How many different clean token sequences both sets hold."""
        return len(set(self.clean) & set(other.clean))

    def to_pandas(self) -> pandas.DataFrame:
        """One row a prompt pair, without the columns that hold nothing."""
        table = self.table
        empty = [c for c in table.column_names if table[c].null_count == len(self)]
        return table.drop_columns(empty).to_pandas()

    def _repr_html_(self) -> str:
        dropped = "".join(
            f"<li>{count} dropped: {html.escape(why)}</li>"
            for why, count in self.dropped
        )
        names = ["clean", "corrupted", "answer_texts", "wrong_answer_texts"]
        if self.table["clean"].null_count:
            names = ["clean_tokens", "corrupted_tokens", "answers", "wrong_answers"]
        shown = self.table.select(names).slice(0, 8).to_pylist()
        head = "".join(f"<th>{name}</th>" for name in names)
        body = "".join(
            "<tr>" + "".join(f"<td>{_cell(row[c])}</td>" for c in names) + "</tr>"
            for row in shown
        )
        pairs = "pair" if len(self) == 1 else "pairs"
        title = f"<p>{len(self):,} prompt {pairs}, {html.escape(self.name)}</p>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return title + table + (f"<ul>{dropped}</ul>" if dropped else "")


@dataclass(frozen=True)
class PromptText:
    """One prompt pair as text; spaces count, also the one before an answer."""

    clean: str
    corrupted: str
    answers: tuple[str, ...]
    wrong_answers: tuple[str, ...]


_COUNTED = ("clean prompts", "corrupted prompts", "answers", "wrong answers")
_n = enumerate


def joined_name(names: Iterable[str]) -> str:
    """The name of prompts put together, as `ioi+greater_than`; each name stands once."""
    return "+".join(dict.fromkeys(part for name in names for part in name.split("+")))


def check_prompts(prompts: object, name: str = "prompts") -> None:
    """Raise ArgumentError `prompts_invalid` for anything but Prompts, such as a file."""
    remedy = "make Prompts with Prompts.from_file, Prompts.from_tokens or a task"
    require_type("prompts_invalid", name, prompts, Prompts, remedy)


def _table(columns: dict[str, list], n: int) -> pa.Table:
    columns = {"prompt": list(range(n)), **columns}
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(n, field.type)
        for field in PROMPT
    ]
    return pa.table(arrays, schema=PROMPT)


def _encoded(
    row: PromptText, number: int, encoder: Encoder, multi_token: bool
) -> dict[str, object]:
    clean, corrupted = encoder.prompt(row.clean), encoder.prompt(row.corrupted)
    answers = [encoder.answer(row.clean, text) for text in row.answers]
    wrong = [encoder.answer(row.clean, text) for text in row.wrong_answers]
    if not clean or not corrupted:
        raise DataError(
            "prompts_row_invalid", f"prompt {number} has no text", row=number
        )
    for text in (row.clean, row.corrupted, *row.answers, *row.wrong_answers):
        _require_known(text, number, encoder)
    if not multi_token:
        texts = (*row.answers, *row.wrong_answers)
        for text, ids in zip(texts, (*answers, *wrong), strict=True):
            _require_single(text, ids, number, encoder)
    return {
        "clean": row.clean,
        "corrupted": row.corrupted,
        "clean_tokens": clean,
        "corrupted_tokens": corrupted,
        "answers": answers,
        "wrong_answers": wrong,
        "answer_texts": row.answers,
        "wrong_answer_texts": row.wrong_answers,
        "clean_token_texts": encoder.pieces(clean),
        "corrupted_token_texts": encoder.pieces(corrupted),
    }


def _require_known(text: str, number: int, encoder: Encoder) -> None:
    if not encoder.knows(text):
        raise DataError(
            "prompt_words_unknown",
            f"prompt {number}: {text!r} has words outside this model's vocabulary "
            f"(read as {list(encoder.pieces(encoder.ids(text)))}); use words it knows",
            row=number,
            value=text,
        )


def _require_single(text: str, ids: Ids, number: int, encoder: Encoder) -> None:
    if len(ids) == 1:
        return
    pieces = encoder.pieces(ids)
    space = "" if text.startswith(" ") else " (is a leading space missing?)"
    raise DataError(
        "answer_not_single_token",
        f"prompt {number}: the answer {text!r} is {len(ids)} tokens, {list(pieces)}"
        f"{space}; choose an answer of one token, or score whole answers with "
        "multi_token_answers=True and the metric answer_logprob",
        row=number,
        value=text,
        pieces=pieces,
        expected="one token",
    )


def _plain(values: Any) -> Any:
    """Lists of what tensors and arrays hold, found by their `tolist`."""
    return values.tolist() if hasattr(values, "tolist") else values


def _token_rows(values: Any, what: str) -> list[list[int]]:
    rows = [_plain(row) for row in _plain(values)]
    for number, row in enumerate(rows):
        if not isinstance(row, list | tuple) or not row or not all(map(_is_id, row)):
            raise DataError(
                "prompt_tokens_invalid",
                f"{what} prompt {number} is no row of token ids; give integers [n, pos], "
                "or a list of lists of integers",
                row=number,
                value=repr(row)[:80],
                what=what,
            )
    return [[int(token) for token in row] for row in rows]


def _is_id(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _answer_sets(values: Any, n: int) -> list[list[list[int]]]:
    if values is None:
        return [[] for _ in range(n)]
    return [_answer_set(_plain(answer), i) for i, answer in enumerate(_plain(values))]


def _answer_set(answer: Any, number: int) -> list[list[int]]:
    if _is_id(answer):
        return [[int(answer)]]
    if not isinstance(answer, list | tuple | set | frozenset):
        raise DataError(
            "prompt_tokens_invalid",
            f"the answer of prompt {number} is neither a token id nor a list of them",
            row=number,
            value=repr(answer)[:80],
            what="answer",
        )
    members = sorted(answer) if isinstance(answer, set | frozenset) else answer
    found = [[m] if _is_id(m) else list(_plain(m)) for m in members]
    return [[int(token) for token in member] for member in found]


def _nested(column: pa.ChunkedArray) -> tuple[tuple[Ids, ...], ...]:
    return tuple(tuple(map(tuple, row)) for row in column.to_pylist())


def _cell(value: object) -> str:
    text = " | ".join(map(repr, value)) if isinstance(value, list) else str(value)
    return f"<code>{html.escape(text)}</code>"
