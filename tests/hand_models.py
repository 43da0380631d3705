"""Hand-weighted GPT-2 models whose circuits are known because we wired them.

Every feature has dimensions of its own in the residual stream. Two ballast dimensions,
large and of opposite sign, fix the variance that LayerNorm divides by, and every read
sums to zero over the stream, so that its mean doesn't matter either: the norm is a
constant rescale up to about one in a thousand. Components that are not wired have zero
weights. No training, no tokenizer; building one takes a moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from circuitlab.prompts import Prompts

BALLAST = 64.0


@dataclass(frozen=True)
class HandModel:
    """A model with known edges.

    `prompts` hold a minimal corruption; patching an edge alone changes the answer only
    for the edges in `carries`. In `blanked` every token but the first is blank in the
    corrupted prompt, so that every edge of `wired` carries a difference.
    """

    model: GPT2LMHeadModel
    prompts: Prompts
    blanked: Prompts
    wired: frozenset[str]
    carries: frozenset[str]


@dataclass(frozen=True)
class _Stream:
    """Which dimensions of the residual stream hold which feature."""

    starts: dict[str, int]
    d_model: int

    @staticmethod
    def of(d_model: int, **sizes: int) -> _Stream:
        starts, used = {}, 2
        for name, size in sizes.items():
            starts[name], used = used, used + size
        assert used <= d_model
        return _Stream(starts, d_model)

    def unit(self, name: str, index: int = 0) -> Tensor:
        vector = torch.zeros(self.d_model)
        vector[self.starts[name] + index] = 1.0
        return vector

    def units(self, name: str, count: int) -> Tensor:
        """Orthonormal rows [count, d_model] of one feature."""
        return torch.stack([self.unit(name, i) for i in range(count)])


@dataclass(frozen=True)
class _Head:
    """What a head reads and writes: rows [slot, d_model], a slot a dimension of the head.

    The attention logit of query and key is the sum over slots of `q · x` times `k · x`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_bias: Tensor | None = None


def _empty(vocab: int, stream: _Stream, layers: int, heads: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=16,
        n_embd=stream.d_model,
        n_layer=layers,
        n_head=heads,
        n_inner=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    config.architectures = ["GPT2LMHeadModel"]
    config._attn_implementation = "eager"
    model = GPT2LMHeadModel(config).eval()
    scale = BALLAST * (2 / stream.d_model) ** 0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(scale if ".ln_" in name and name.endswith("weight") else 0.0)
        model.transformer.wpe.weight[:, 0] = BALLAST
        model.transformer.wpe.weight[:, 1] = -BALLAST
    return model


def _blind_to_mean(read: Tensor) -> Tensor:
    """Make rows sum to zero through the ballast dimensions, whose sum is zero."""
    read = read.clone()
    read[:, :2] = -read[:, 2:].sum(-1, keepdim=True) / 2
    return read


@torch.no_grad()
def _wire(model: GPT2LMHeadModel, layer: int, head: int, wiring: _Head) -> None:
    config, at = model.config, f"transformer.h.{layer}.attn"
    d_head = config.n_embd // config.n_head
    joint = model.get_parameter(f"{at}.c_attn.weight").view(
        config.n_embd, 3, config.n_head, d_head
    )
    bias = model.get_parameter(f"{at}.c_attn.bias").view(3, config.n_head, d_head)
    # The model divides attention logits by the root of d_head.
    reads = (wiring.q * d_head**0.5, wiring.k, wiring.v)
    for port, read in enumerate(reads):
        joint[:, port, head, : len(read)] = _blind_to_mean(read).T
    if wiring.q_bias is not None:
        bias[0, head, : len(wiring.q_bias)] = wiring.q_bias * d_head**0.5
    out = model.get_parameter(f"{at}.c_proj.weight").view(
        config.n_head, d_head, config.n_embd
    )
    out[head, : len(wiring.o)] = wiring.o


WORDS, LENGTH = 16, 10


def induction_model(n: int = 48, seed: int = 0) -> HandModel:
    """Two layers of two heads: a previous-token head feeds an induction head.

    Prompts are `BOS … A B … W … A`; the answer is B, the wrong answer W, which stands
    there once as well. In the corrupted prompt both A are other words, and different
    ones. Clean logit difference about 10, corrupted 0.
    """
    stream = _Stream.of(
        64, word=WORDS, bos=1, blank=1, place=LENGTH, before=WORDS, out=WORDS
    )
    model = _empty(WORDS + 2, stream, layers=2, heads=2)
    word, out = stream.units("word", WORDS), stream.units("out", WORDS)
    before, place = stream.units("before", WORDS), stream.units("place", LENGTH)
    bos, blank = stream.units("bos", 1), stream.units("blank", 1)
    with torch.no_grad():
        model.transformer.wte.weight.copy_(torch.cat([word, bos, blank]))
        model.transformer.wpe.weight[:LENGTH] += place
        model.lm_head.weight[:WORDS] = 10 * _blind_to_mean(out)
    # One slot a place, one for keys (BOS is the sink), one for blank queries.
    queries = torch.cat([20 * place[1:], 0 * bos, 30 * blank])
    keys = torch.cat([place[:-1], 15 * bos - 10 * blank, bos])
    always = torch.zeros(LENGTH + 1)
    always[LENGTH - 1] = 1.0
    _wire(model, 0, 0, _Head(queries, keys, word, before, always))
    _wire(model, 1, 0, _Head(10 * word, before, word, out))
    wired = (
        "input->a0.h0<q> input->a0.h0<k> input->a0.h0<v> input->a1.h0<q> "
        "a0.h0->a1.h0<k> input->a1.h0<v> a1.h0->logits"
    )
    carries = "input->a0.h0<v> input->a1.h0<q> a0.h0->a1.h0<k> a1.h0->logits"
    pairs, blanked = _induction_prompts(n, seed)
    return HandModel(
        model, pairs, blanked, frozenset(wired.split()), frozenset(carries.split())
    )


def _induction_prompts(n: int, seed: int) -> tuple[Prompts, Prompts]:
    rng, rows = Random(seed), []
    for _ in range(n):
        a, b, w, x, y, *fillers = rng.sample(range(WORDS), LENGTH + 1)
        middle = [w, *fillers[: LENGTH - 5]]
        rng.shuffle(middle)
        at = rng.randrange(len(middle) + 1)
        clean = [WORDS, *middle[:at], a, b, *middle[at:], a]
        corrupted = [WORDS, *middle[:at], x, b, *middle[at:], y]
        rows.append((clean, corrupted, b, w))
    return _prompt_sets(rows, blank=WORDS + 1)


def _prompt_sets(
    rows: list[tuple[list[int], list[int], int, int]], blank: int
) -> tuple[Prompts, Prompts]:
    clean, corrupted, answers, wrong = zip(*rows, strict=True)
    blanks = [[row[0], *[blank] * (len(row) - 1)] for row in clean]
    return (
        Prompts.from_tokens(clean, corrupted, answers, wrong, name="hand"),
        Prompts.from_tokens(clean, blanks, answers, wrong, name="hand blanked"),
    )


NAMES, PLACES, FILLERS = 12, 9, 6
BOS, BLANK, END = NAMES, NAMES + 1, NAMES + 2


def ioi_model(n: int = 48, seed: int = 0, *, sharp: bool = False) -> HandModel:
    """Three layers of four heads: IOI's story in its simplest form.

    A duplicate-token head marks S2, an S-inhibition head carries that name to the end,
    two name movers and a negative one attend to the names that are not inhibited. In
    the corrupted prompt S2 is a third name. `sharp` triples every attention logit, so
    that every softmax is saturated. Clean logit difference about 12, corrupted 0.
    """
    stream = _Stream.of(
        96, name=NAMES, kinds=4, place=PLACES, dup=NAMES, inhibit=NAMES, out=NAMES
    )
    model = _empty(NAMES + 3 + FILLERS, stream, layers=3, heads=4)
    name, dup = stream.units("name", NAMES), stream.units("dup", NAMES)
    inhibit, out = stream.units("inhibit", NAMES), stream.units("out", NAMES)
    bos, blank, end, is_name = (stream.unit("kinds", i)[None] for i in range(4))
    place = stream.units("place", PLACES)
    with torch.no_grad():
        words = torch.cat([name + is_name, bos, blank, end])
        model.transformer.wte.weight[: len(words)] = words
        model.transformer.wpe.weight[:PLACES] += place
        model.lm_head.weight[:NAMES] = _blind_to_mean(out)
    times = 3 if sharp else 1
    # The same name matches, but not at the same place; BOS is the sink.
    always = torch.zeros(NAMES + PLACES + 1)
    always[-1] = times
    queries = times * torch.cat([20 * name, -40 * place, 0 * bos])
    keys = torch.cat([name, place, 10 * bos])
    _wire(model, 0, 0, _Head(queries, keys, name, dup, always))
    # Small enough that the attention fails without the duplicate's mark.
    marked = 9 * dup.sum(0, keepdim=True) + (1 / 6 if sharp else 2) * is_name
    _wire(model, 1, 0, _Head(times * end, marked, dup, inhibit))
    mover_q = times * torch.cat([-12 * inhibit, end])
    mover_k = torch.cat([name, 10 * is_name])
    for head, writes in enumerate((7, 7, -2)):
        _wire(model, 2, head, _Head(mover_q, mover_k, name, writes * out))
    wired, carries = _ioi_edges()
    pairs, blanked = _ioi_prompts(n, seed)
    return HandModel(model, pairs, blanked, wired, carries)


def _ioi_edges() -> tuple[frozenset[str], frozenset[str]]:
    heads = ["input->a0.h0<q>", "a0.h0->a1.h0<k>", "a0.h0->a1.h0<v>"]
    still = ["input->a0.h0<k>", "input->a0.h0<v>", "input->a1.h0<q>", "input->a1.h0<k>"]
    for mover in ("a2.h0", "a2.h1", "a2.h2"):
        heads += [f"a1.h0->{mover}<q>", f"input->{mover}<k>", f"{mover}->logits"]
        still += [f"input->{mover}<q>", f"input->{mover}<v>"]
    return frozenset(heads + still), frozenset(heads)


def _ioi_prompts(n: int, seed: int) -> tuple[Prompts, Prompts]:
    rng, rows = Random(seed), []
    for _ in range(n):
        io, s, third = rng.sample(range(NAMES), 3)
        first, second = rng.sample([io, s], 2)
        f = [END + 1 + rng.randrange(FILLERS) for _ in range(4)]
        before = [BOS, f[0], first, f[1], second, f[2]]
        clean, corrupted = ([*before, x, f[3], END] for x in (s, third))
        rows.append((clean, corrupted, io, s))
    return _prompt_sets(rows, blank=BLANK)
