"""Text to token ids, by whatever tokenizer a model brings.

An Encoder is a tokenizer with one decision made: whether a BOS token stands before a
prompt. It never changes the tokenizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from circuitlab.errors import ArgumentError
from circuitlab.tables import digest

Ids = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Encoder:
    """A Hugging Face tokenizer and whether prompts begin with its BOS token."""

    tokenizer: Any  # a transformers tokenizer, of any of its classes
    prepend_bos: bool
    _ids: dict[str, Ids] = field(default_factory=dict, repr=False)
    _pieces: dict[int, str] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(model: Any, prepend_bos: bool | None = None) -> Encoder:
        """Take the tokenizer of a model (or a tokenizer itself).

        `prepend_bos=None` is what a freshly loaded tokenizer does to plain text. A
        model may have changed its tokenizer since: one that says `adds_bos` is believed,
        another's tokenizer is read from its files again.

        Raises ArgumentError `tokenizer_missing`, `bos_token_missing`.
        """
        tokenizer = model if hasattr(model, "encode") else _tokenizer_of(model)
        if tokenizer is None:
            raise ArgumentError(
                "tokenizer_missing",
                "text needs a tokenizer: pass model=, loaded with its tokenizer, or "
                "give token ids with Prompts.from_tokens",
                value=type(model).__name__,
            )
        if prepend_bos is None:
            prepend_bos = _adds_bos(model, tokenizer)
        if prepend_bos and tokenizer.bos_token_id is None:
            raise ArgumentError(
                "bos_token_missing",
                "this tokenizer has no BOS token; pass prepend_bos=False",
                value=True,
                expected=False,
            )
        return Encoder(tokenizer, bool(prepend_bos))

    def ids(self, text: str) -> Ids:
        """Token ids of the text alone: no BOS, no other special token."""
        if text not in self._ids:
            found = self.tokenizer.encode(text, add_special_tokens=False)
            self._ids[text] = tuple(int(token) for token in found)
        return self._ids[text]

    def prompt(self, text: str) -> Ids:
        """Token ids of a prompt, after the BOS token where there is one."""
        bos = (int(self.tokenizer.bos_token_id),) if self.prepend_bos else ()
        return bos + self.ids(text)

    def answer(self, prompt: str, text: str) -> Ids:
        """Token ids of an answer that follows the prompt.

        Tokenizers that put a space of their own before a text would give " Mary" one
        token too many when it stands alone, so there it is read after the prompt.
        """
        if self._splits_anywhere:
            return self.ids(text)
        before, whole = self.ids(prompt), self.ids(prompt + text)
        return whole[len(before) :] if self._extends(before, whole) else self.ids(text)

    def continues(self, prompt: str, text: str) -> bool:
        """Whether the answer's tokens follow the prompt's, without merging into them."""
        before, whole = self.ids(prompt), self.ids(prompt + text)
        return self._extends(before, whole)

    def pieces(self, ids: Ids) -> tuple[str, ...]:
        """The text of every token."""
        for token in ids:
            if token not in self._pieces:
                self._pieces[token] = self.tokenizer.decode([token])
        return tuple(self._pieces[token] for token in ids)

    def knows(self, text: str) -> bool:
        """Whether no part of the text is outside the vocabulary."""
        found = self.ids(text)
        return bool(found) and self._unknown not in found

    def single(self, text: str) -> bool:
        """Whether the text, as it continues a sentence, is one known token."""
        return self.knows(text) and len(self.answer("The", text)) == 1

    @cached_property
    def digest(self) -> str:
        """Identity of the vocabulary."""
        return digest(sorted(self.tokenizer.get_vocab().items()))

    @cached_property
    def _unknown(self) -> int | None:
        return self.tokenizer.unk_token_id

    @cached_property
    def _splits_anywhere(self) -> bool:
        return self.ids("one") + self.ids(" two") == self.ids("one two")

    @staticmethod
    def _extends(before: Ids, whole: Ids) -> bool:
        return len(whole) > len(before) and whole[: len(before)] == before


def _tokenizer_of(model: Any) -> Any:
    return getattr(model, "tokenizer", None)


def _adds_bos(model: Any, tokenizer: Any) -> bool:
    said = getattr(model, "adds_bos", None)
    if isinstance(said, bool):
        return said
    if model is not tokenizer and tokenizer.init_kwargs.get("add_bos_token"):
        # TransformerLens makes every tokenizer add BOS; only the files say what it was.
        tokenizer = _fresh(tokenizer)
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer.encode("one")[:1] == [bos]


def _fresh(tokenizer: Any) -> Any:
    """The tokenizer as its files have it, or itself where they are out of reach."""
    try:
        return type(tokenizer).from_pretrained(
            tokenizer.name_or_path, local_files_only=True
        )
    except (OSError, ValueError):
        return tokenizer
