"""Greater-than: "The war lasted from the year 1732 to the year 17" → a later year.

Source: Hanna et al. 2023, "How does GPT-2 compute greater-than?", arXiv 2305.00586.
How many digits are to be predicted depends on how the tokenizer splits a year.
"""

from __future__ import annotations

from random import Random
from typing import Any

from circuitlab.encoding import Encoder
from circuitlab.errors import DataError
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import (
    Draw,
    Dropped,
    collect,
    known_templates,
    require,
    single_tokens,
)
from circuitlab.tasks.words import listed

TEMPLATES = (
    "The {noun} lasted from the year {year} to the year {start}",
    "The {noun} went on from the year {year} to the year {start}",
)

NOUNS = listed(
    """
    war conflict project journey battle contract voyage trial crisis strike study
    program campaign siege reign plague drought debate expedition mission
    """
)


def greater_than(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    *,
    prepend_bos: bool | None = None,
) -> Prompts:
    """Make greater-than prompts: how does a year end that is later than the first?

    Tokenizers with one token per digit (Llama, SmolLM2) see "1867 to the year 186":
    the answers are the digits above 7, the wrong answers those below; in the corrupted
    prompt the first year ends in 0, and nothing is ruled out. The digit is 4 to 8, so
    that the corrupted prompt does not favour the answers by their number.
    Tokenizers with two-digit tokens (GPT-2) see "1732 to the year 17" as in the paper:
    the answers are all two-digit tokens above 32, the wrong ones those below, and the
    corrupted year ends in 01. Years whose digits split otherwise are dropped.

    Raises ArgumentError `tokenizer_missing`, `task_size_invalid`; DataError
    `task_too_small`, `task_needs_digits` (a tokenizer that splits years otherwise).
    """
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    nouns = single_tokens(NOUNS, encoder, "noun", dropped)
    templates = known_templates(TEMPLATES, encoder, dropped)
    require("greater_than", 1, dropped, nouns=nouns, templates=templates)
    digits = _digits_a_token(encoder)
    draw = (_draw_digit if digits == 1 else _draw_pair)(encoder, nouns, templates)
    return collect("greater_than", draw, n, seed, encoder, dropped)


def _draw_digit(encoder: Encoder, nouns: list[str], templates: list[str]) -> Draw:
    def draw(rng: Random) -> PromptText:
        start = f"1{rng.randrange(1, 9)}{rng.randrange(10)}"
        digit = rng.randrange(4, 9)
        template, noun = rng.choice(templates), rng.choice(nouns)
        return PromptText(
            template.format(noun=noun, year=f"{start}{digit}", start=start),
            template.format(noun=noun, year=f"{start}0", start=start),
            tuple(str(later) for later in range(digit + 1, 10)),
            tuple(str(earlier) for earlier in range(digit)),
        )

    return draw


def _draw_pair(encoder: Encoder, nouns: list[str], templates: list[str]) -> Draw:
    pairs = [f"{i:02d}" for i in range(100)]
    usable = [pair for pair in pairs if len(encoder.answer("The year 17", pair)) == 1]

    def draw(rng: Random) -> PromptText:
        start = str(rng.randrange(11, 18))
        end = rng.randrange(2, 99)
        template, noun = rng.choice(templates), rng.choice(nouns)
        return PromptText(
            template.format(noun=noun, year=f"{start}{end:02d}", start=start),
            template.format(noun=noun, year=f"{start}01", start=start),
            tuple(pair for pair in usable if int(pair) > end),
            tuple(pair for pair in usable if int(pair) < end),
        )

    return draw


def _digits_a_token(encoder: Encoder) -> int:
    """How a year ends: with a token of one digit, or of two.

    A few years are tried, because common ones can be a token of their own.
    """
    ends = [
        encoder.pieces(encoder.ids(f"The year {year}"))[-1]
        for year in (1732, 1643, 1438, 1276, 1589)
    ]
    lengths = [len(end) for end in ends if end.isdigit()]
    for digits in (1, 2):
        if lengths.count(digits) * 2 > len(ends):
            return digits
    raise DataError(
        "task_needs_digits",
        f"greater_than needs years that end in a token of one or two digits; this "
        f"tokenizer ends them in {ends}; use another task or model",
        value=ends,
        expected="1 or 2 digits",
    )
