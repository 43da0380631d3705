"""Small tokenizers of the kinds that models bring, built in memory."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

ONE_DIGIT = r"'[a-z]+| ?[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]|\s"
TWO_DIGITS = r"'[a-z]+| ?[A-Za-z]+| ?[0-9]{2}|[^\sA-Za-z0-9]|\s"
WHOLE_YEARS = r"'[a-z]+| ?[A-Za-z]+| ?[0-9]+|[^\sA-Za-z0-9]|\s"


def word_tokenizer(
    texts: Iterable[str], pattern: str = ONE_DIGIT, *, bos: bool = False
) -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows the tokens of `texts`; `bos` adds `<s>`."""
    known = sorted({token for text in texts for token in re.findall(pattern, text)})
    ids = {token: i for i, token in enumerate(["<unk>", "<s>", *known])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")  # type: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[reportAttributeAccessIssue]
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[reportAttributeAccessIssue]
            single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>"
    )


def spaced_tokenizer(words: Iterable[str]) -> PreTrainedTokenizerFast:
    """As Llama's first: puts a space of its own before every text."""
    ids = {f"▁{word}": i for i, word in enumerate(words, start=2)}
    ids |= {"<unk>": 0, "▁": 1}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(  # type: ignore[reportAttributeAccessIssue]
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    split = pre_tokenizers.Split(Regex(r"▁?[A-Za-z]+|▁"), "isolated")
    tokenizer.pre_tokenizer = split  # type: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
