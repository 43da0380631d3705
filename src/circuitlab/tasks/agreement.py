"""Subject-verb agreement: "The keys near the table" → " are", not " is".

Source: after Linzen et al. 2016, arXiv 1611.01368: a second noun between subject and
verb, of either number.
"""

from __future__ import annotations

from random import Random
from typing import Any

from circuitlab.encoding import Encoder
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import Dropped, collect, known_templates, require
from circuitlab.tasks.words import listed

TEMPLATES = (
    "The {subject} near the {other}",
    "I saw that the {subject} behind the {other}",
    "We heard that the {subject} beside the {other}",
    "Today the {subject} next to the {other}",
    "You said that the {subject} above the {other}",
)

NOUNS = listed(
    """
    boy dog cat car tree table picture box door bird cup flag girl plant shop wall
    """
)

SINGULAR, PLURAL = (" is", " was"), (" are", " were")


def agreement(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    *,
    prepend_bos: bool | None = None,
) -> Prompts:
    """Make agreement prompts: which verbs fit the number of the subject?

    The answers are " is" and " was", or " are" and " were"; the wrong answers are the
    other two. The corrupted prompt has the subject in the other number; the second
    noun, of either number, stays.

    Raises ArgumentError `tokenizer_missing`, `task_size_invalid`; DataError
    `task_too_small`.
    """
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    nouns = [noun for noun in NOUNS if _both_numbers(noun, encoder)]
    if len(nouns) < len(NOUNS):
        dropped["noun: a number is not one known token"] += len(NOUNS) - len(nouns)
    templates = known_templates(TEMPLATES, encoder, dropped)
    require("agreement", 2, dropped, nouns=nouns)
    require("agreement", 1, dropped, templates=templates)

    def draw(rng: Random) -> PromptText:
        subject, other = rng.sample(nouns, 2)
        template = rng.choice(templates)
        other += rng.choice(["", _ending(other)])
        one = template.format(subject=subject, other=other)
        many = template.format(subject=subject + _ending(subject), other=other)
        if rng.random() < 0.5:
            return PromptText(one, many, SINGULAR, PLURAL)
        return PromptText(many, one, PLURAL, SINGULAR)

    return collect("agreement", draw, n, seed, encoder, dropped)


def _ending(noun: str) -> str:
    return "es" if noun.endswith("x") else "s"


def _both_numbers(noun: str, encoder: Encoder) -> bool:
    numbers = (noun, noun + _ending(noun))
    return all(encoder.single(f" {word}") for word in numbers)
