"""Induction: random words, then the same words again; what comes next?

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson
et al. 2022, arXiv 2209.11895.
"""

from __future__ import annotations

from random import Random
from typing import Any

from circuitlab.encoding import Encoder
from circuitlab.errors import ArgumentError
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import Dropped, collect, require, single_tokens
from circuitlab.tasks.words import listed

WORDS = listed(
    """
    apple river stone cloud tiger chair bread silver window forest candle mountain
    horse paper ocean flower winter engine bridge mirror orange ladder pencil rabbit
    copper island button carpet dragon hammer jacket kitchen lemon marble needle
    olive pepper rocket saddle tunnel velvet wagon yellow anchor blanket circle
    desert feather guitar honey iron jungle knife lamp magnet night onion pillow
    queen ribbon sugar thunder umbrella valley whistle zebra
    """
)


def induction(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    *,
    prepend_bos: bool | None = None,
    shortest: int = 6,
    longest: int = 8,
) -> Prompts:
    """Make induction prompts: a list of different words, then its beginning again.

    The list has `shortest` to `longest` words, and 2 to all but one of them are
    repeated, so no fixed distance leads to the answer. The answer is the word that
    followed the last one before; the wrong answer is another word of the repeated
    part. In the corrupted prompt the first list is of other words, and nothing repeats.

    Raises ArgumentError `tokenizer_missing`, `task_size_invalid`,
    `induction_length_invalid`; DataError `task_too_small`.
    """
    if not 3 <= shortest <= longest:
        raise ArgumentError(
            "induction_length_invalid",
            f"lists of {shortest} to {longest} words: write 3 <= shortest <= longest",
            value=(shortest, longest),
        )
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    words = single_tokens(WORDS, encoder, "word", dropped)
    require("induction", 2 * longest, dropped, words=words)

    def draw(rng: Random) -> PromptText:
        length = rng.randint(shortest, longest)
        repeated = rng.randint(2, length - 1)
        drawn = rng.sample(words, 2 * length)
        first, other = drawn[:length], drawn[length:]
        again = first[:repeated]
        return PromptText(
            "".join(f" {word}" for word in first + again),
            "".join(f" {word}" for word in other + again),
            (f" {first[repeated]}",),
            (f" {rng.choice(again[:-1])}",),
        )

    return collect("induction", draw, n, seed, encoder, dropped)
