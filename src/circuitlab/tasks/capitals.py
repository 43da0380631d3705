"""Capitals: "The capital of France is the city of" → " Paris"."""

from __future__ import annotations

from random import Random
from typing import Any

from circuitlab.encoding import Encoder
from circuitlab.prompts import Prompts, PromptText
from circuitlab.tasks.collect import Dropped, collect, known_templates, require

TEMPLATES = (
    "The capital of {country} is the city of",
    "The name of the capital of {country} is",
    "Everyone knows that the capital of {country} is called",
    "The government of {country} sits in the city of",
    "I went to {country} and visited its capital,",
    "The largest embassies in {country} are in the capital,",
)

CAPITALS = {
    "France": "Paris",
    "Italy": "Rome",
    "Spain": "Madrid",
    "Germany": "Berlin",
    "England": "London",
    "Japan": "Tokyo",
    "China": "Beijing",
    "Russia": "Moscow",
    "Egypt": "Cairo",
    "Greece": "Athens",
    "Austria": "Vienna",
    "Ireland": "Dublin",
    "Iraq": "Baghdad",
    "Iran": "Tehran",
    "Portugal": "Lisbon",
    "Poland": "Warsaw",
    "Cuba": "Havana",
    "Sweden": "Stockholm",
}


def capitals(
    n: int = 64,
    seed: int = 0,
    model: Any = None,  # anything with a tokenizer, or a tokenizer
    *,
    prepend_bos: bool | None = None,
) -> Prompts:
    """Make capital prompts: recall of a fact.

    The corrupted prompt names another country; its capital is the wrong answer.

    Raises ArgumentError `tokenizer_missing`, `task_size_invalid`; DataError
    `task_too_small`.
    """
    encoder, dropped = Encoder.of(model, prepend_bos), Dropped()
    known = [pair for pair in CAPITALS.items() if _single(pair, encoder)]
    if len(known) < len(CAPITALS):
        dropped["country: not one known token"] += len(CAPITALS) - len(known)
    templates = known_templates(TEMPLATES, encoder, dropped)
    require("capitals", 2, dropped, countries=known)
    require("capitals", 1, dropped, templates=templates)

    def draw(rng: Random) -> PromptText:
        (country, capital), (other, wrong) = rng.sample(known, 2)
        template = rng.choice(templates)
        return PromptText(
            template.format(country=country),
            template.format(country=other),
            (f" {capital}",),
            (f" {wrong}",),
        )

    return collect("capitals", draw, n, seed, encoder, dropped)


def _single(pair: tuple[str, str], encoder: Encoder) -> bool:
    return all(encoder.single(f" {word}") for word in pair)
