"""What circuitlab ships: a small trained model that does five of the tasks.

How it was made and what it does: `docs/embedded_model.md`.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from circuitlab.prompts import Prompts


def embedded_model() -> Path:
    """The folder of the embedded model, in Hugging Face's format, with its tokenizer."""
    return Path(__file__).parent / "embedded"


def is_held_out(text: str) -> bool:
    """Whether a prompt's text was kept out of the embedded model's training."""
    return hashlib.sha256(text.encode()).digest()[0] < 64


def held_out(prompts: Prompts) -> Prompts:
    """The prompts that the embedded model was not trained on (about a quarter)."""
    texts = prompts.table["clean"].to_pylist()
    return prompts.take(i for i, text in enumerate(texts) if is_held_out(text))
