"""What every task shares: filter words, draw pairs, check them, say what was dropped.

A task gives a function that draws one pair of texts from a random generator. Here the
pairs are checked against the tokenizer until there are enough of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random

from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError, DataError
from circuitlab.prompts import Prompts, PromptText

Draw = Callable[[Random], PromptText]
Dropped = Counter[str]

_FIELD = re.compile(r" ?\{\w+\}")


def single_tokens(
    words: Sequence[str], encoder: Encoder, what: str, dropped: Dropped
) -> list[str]:
    """Keep the words that are one known token after a space; count the others."""
    kept = [word for word in words if encoder.single(" " + word)]
    if len(kept) < len(words):
        dropped[f"{what}: not one known token"] += len(words) - len(kept)
    return kept


def known_templates(
    templates: Sequence[str], encoder: Encoder, dropped: Dropped
) -> list[str]:
    """Keep the templates of known words only; count the others."""
    kept = [text for text in templates if _known(text, encoder)]
    if len(kept) < len(templates):
        unknown = len(templates) - len(kept)
        dropped["template: words outside the vocabulary"] += unknown
    return kept


def _known(template: str, encoder: Encoder) -> bool:
    parts = [part for part in _FIELD.split(template) if part]
    return all(encoder.knows(part) for part in parts)


def require(task: str, minimum: int, dropped: Dropped, **pools: Sequence) -> None:
    """Raise DataError `task_too_small` where a pool has fewer than `minimum` members."""
    for what, pool in pools.items():
        if len(pool) < minimum:
            raise _too_small(
                task, f"{len(pool)} {what} of the {minimum} it needs", 0, None, dropped
            )


def collect(
    task: str, draw: Draw, n: int, seed: int, encoder: Encoder, dropped: Dropped
) -> Prompts:
    """Draw until `n` different pairs pass: deterministic in task, seed and vocabulary.

    A pair passes if all its words are known, both texts have as many tokens, and every
    answer is one token that follows either text without merging into it.

    Raises ArgumentError `task_size_invalid`, DataError `task_too_small`.
    """
    if n < 1:
        raise ArgumentError(
            "task_size_invalid", f"n={n}: ask for 1 prompt or more", value=n
        )
    rng = Random(f"{task} {seed}")
    rows: dict[str, PromptText] = {}
    for _ in range(20 * n + 500):
        row = draw(rng)
        reason = "pair: drawn before" if row.clean in rows else _problem(row, encoder)
        if reason:
            dropped[reason] += 1
            continue
        rows[row.clean] = row
        if len(rows) == n:
            break
    if len(rows) < n:
        raise _too_small(task, f"{len(rows)} of {n} prompts", len(rows), n, dropped)
    prompts = Prompts.from_texts(list(rows.values()), encoder, name=task)
    return replace(prompts, seed=seed, dropped=tuple(sorted(dropped.items())))


def _problem(row: PromptText, encoder: Encoder) -> str | None:
    if not (encoder.knows(row.clean) and encoder.knows(row.corrupted)):
        return "pair: words outside the vocabulary"
    if len(encoder.ids(row.clean)) != len(encoder.ids(row.corrupted)):
        return "pair: clean and corrupted differ in length"
    answers = (*row.answers, *row.wrong_answers)
    if any(len(encoder.answer(row.clean, text)) != 1 for text in answers):
        return "pair: an answer is not one token"
    both = (row.clean, row.corrupted)
    if not all(encoder.continues(text, a) for text in both for a in answers):
        return "pair: an answer merges with the prompt's last token"
    return None


def _too_small(
    task: str, found: str, count: int, n: int | None, dropped: Dropped
) -> DataError:
    why = "; ".join(f"{reason}: {number}" for reason, number in sorted(dropped.items()))
    remedy = f"ask for n={count} or fewer" if count else "use another task or model"
    return DataError(
        "task_too_small",
        f"{task} finds only {found} with this tokenizer ({why or 'nothing dropped'}); {remedy}",
        task=task,
        value=count,
        expected=n,
        dropped=dict(dropped),
    )
