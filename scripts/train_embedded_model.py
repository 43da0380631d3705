"""Train the embedded model: python scripts/train_embedded_model.py [--out FOLDER].

A GPT-2 of three layers and four heads learns five of the library's tasks at once. Its
loss is the cross-entropy at the answer's position plus a group lasso on the heads'
query, key, value and output matrices and on the MLPs, so that what no task needs goes
to zero; what is small then is set to zero, and the rest is trained on.

One thread and one seed give the same weights on one machine; on another, nearly so.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from circuitlab import tasks
from circuitlab.data import embedded_model, is_held_out
from circuitlab.prompts import Prompts
from circuitlab.tasks import words
from circuitlab.tasks.agreement import NOUNS as AGREEMENT_NOUNS
from circuitlab.tasks.agreement import TEMPLATES as AGREEMENT_TEMPLATES
from circuitlab.tasks.greater_than import NOUNS as GREATER_THAN_NOUNS
from circuitlab.tasks.greater_than import TEMPLATES as GREATER_THAN_TEMPLATES
from circuitlab.tasks.induction import WORDS as INDUCTION_WORDS
from circuitlab.tasks.ioi import DISTRACTOR
from circuitlab.tasks.ioi import TEMPLATES as IOI_TEMPLATES
from circuitlab.tasks.pronouns import ROLES, TRAITS
from circuitlab.tasks.pronouns import TEMPLATES as PRONOUN_TEMPLATES

LAYERS, HEADS, D_MODEL, D_MLP = 3, 4, 96, 128
N_NAMES, N_WORDS = 24, 40
TOKEN = r"'[a-z]+| ?[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]|\s"
DIGITS = "0123456789"
SLACK = 0.05  # nats that a pool's loss may rise when a group is dropped


def vocabulary() -> list[str]:
    """Every token of the tasks' templates, and the words that fill them."""
    templates = (
        *AGREEMENT_TEMPLATES,
        *GREATER_THAN_TEMPLATES,
        *IOI_TEMPLATES,
        *PRONOUN_TEMPLATES,
        f"{DISTRACTOR} Then",
        " Then",
    )
    texts = [re.sub(r" ?\{\w+\}", "", text) for text in templates]
    found = [token for text in texts for token in re.findall(TOKEN, text)]
    nouns = [form for noun in AGREEMENT_NOUNS for form in (noun, _plural(noun))]
    fillers = [
        *words.NAMES[:N_NAMES],
        *words.PLACES,
        *words.OBJECTS,
        *TRAITS,
        *ROLES,
        *nouns,
        *GREATER_THAN_NOUNS,
        *INDUCTION_WORDS[:N_WORDS],
        *["he", "she", "is", "was", "are", "were"],
    ]
    found += [f" {word}" for word in fillers] + [" ", *DIGITS]
    return ["<pad>", "<unk>", *sorted(set(found))]


def _plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("x") else "s")


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer whose words hold the space before them; no BOS."""
    ids = {token: i for i, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(TOKEN), "isolated")  # type: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # type: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        pad_token="<pad>",
        eos_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=32,
    )


@dataclass(frozen=True)
class Pool:
    """Training examples: ids [n, pos] padded on the right, position, target [n, vocab]."""

    tokens: Tensor
    last: Tensor
    target: Tensor
    share: float

    def __len__(self) -> int:
        return len(self.tokens)


def make_pools(tokenizer: PreTrainedTokenizerFast, n: int, seed: int) -> list[Pool]:
    """Draw training examples from the tasks, without what is held out."""
    size = len(tokenizer)
    abc = tasks.ioi(n, seed, tokenizer)
    counted = tasks.ioi(n, seed + 1, tokenizer, "s2_random", distractor=True)
    greater = tasks.greater_than(n // 2, seed, tokenizer)
    induced = tasks.induction(n, seed, tokenizer)
    he_she = tasks.pronouns(min(n // 2, 3600), seed, tokenizer)
    verbs = tasks.agreement(min(n // 2, 3600), seed, tokenizer)
    names = {tokenizer.get_vocab()[f" {name}"] for name in words.NAMES[:N_NAMES]}

    def first_two_names(ids: tuple[int, ...]) -> list[int]:
        return [token for token in ids if token in names][-3:-1]

    return [
        _pool(_pairs(abc), size, 0.2),
        _pool(_pairs(counted), size, 0.12),
        _pool(_ruled(abc, first_two_names), size, 0.05),
        _pool(_ruled(counted, first_two_names), size, 0.05),
        _pool(_later_digits(greater, tokenizer, seed), size, 0.13),
        _pool(_pairs(induced), size, 0.25),
        _pool(_pairs(he_she), size, 0.1),
        _pool(_pairs(verbs), size, 0.1),
    ]


Example = tuple[tuple[int, ...], list[int]]


def _kept(prompts: Prompts) -> Iterator[int]:
    texts = prompts.table["clean"].to_pylist()
    return (i for i, text in enumerate(texts) if not is_held_out(text))


def _pairs(prompts: Prompts) -> list[Example]:
    answers = [[answer[0] for answer in row] for row in prompts.answers]
    return [(prompts.clean[i], answers[i]) for i in _kept(prompts)]


def _ruled(prompts: Prompts, rule: Callable[[tuple[int, ...]], list[int]]):
    """Corrupted prompts whose right answers a rule tells from their ids."""
    return [(prompts.corrupted[i], rule(prompts.corrupted[i])) for i in _kept(prompts)]


def _later_digits(prompts: Prompts, tokenizer: PreTrainedTokenizerFast, seed: int):
    """Every first year of every kept prompt gets another last digit, 0 to 8."""
    digits = [tokenizer.get_vocab()[digit] for digit in DIGITS]
    found, rng = [], Random(seed)
    texts = prompts.table["clean"].to_pylist()
    for i in _kept(prompts):
        year = re.search(r"\d{4}", texts[i])
        assert year is not None
        for digit in rng.sample(range(9), 4):
            end = year.end()
            text = f"{texts[i][: end - 1]}{digit}{texts[i][end:]}"
            if not is_held_out(text):
                ids = tokenizer.encode(text, add_special_tokens=False)
                found.append((tuple(ids), digits[digit + 1 :]))
    return found


def _pool(examples: list[Example], size: int, share: float) -> Pool:
    longest = max(len(ids) for ids, _ in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    target = torch.zeros(len(examples), size)
    for row, (ids, answers) in enumerate(examples):
        tokens[row, : len(ids)] = torch.tensor(ids)
        target[row, answers] = 1 / len(answers)
    last = torch.tensor([len(ids) - 1 for ids, _ in examples])
    return Pool(tokens, last, target, share)


def make_model(size: int) -> GPT2LMHeadModel:
    config = GPT2Config(
        vocab_size=size,
        n_positions=32,
        n_embd=D_MODEL,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=D_MLP,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
    )
    config.architectures = ["GPT2LMHeadModel"]
    return GPT2LMHeadModel(config)


def losses(model: GPT2LMHeadModel, pools: list[Pool], batch: int, draw) -> list[Tensor]:
    """Mean cross-entropy of a batch from every pool, by its share."""
    found = []
    for pool in pools:
        rows = torch.randint(len(pool), (round(batch * pool.share),), generator=draw)
        hidden = model.transformer(pool.tokens[rows]).last_hidden_state
        at_end = hidden[torch.arange(len(rows)), pool.last[rows]]
        log_probs = model.lm_head(at_end).log_softmax(-1)
        found.append(-(pool.target[rows] * log_probs).sum(-1).mean())
    return found


def groups(model: GPT2LMHeadModel) -> list[tuple[str, list[Tensor]]]:
    """The weights that are kept or dropped together, by name."""
    found = []
    d_head = D_MODEL // HEADS
    for layer in range(LAYERS):

        def weight(name: str, layer: int = layer) -> Tensor:
            return model.get_parameter(f"transformer.h.{layer}.{name}")

        joint = weight("attn.c_attn.weight").view(D_MODEL, 3, HEADS, d_head)
        bias = weight("attn.c_attn.bias").view(3, HEADS, d_head)
        out = weight("attn.c_proj.weight").view(HEADS, d_head, D_MODEL)
        for head in range(HEADS):
            name = f"a{layer}.h{head}"
            pattern = [joint[:, :2, head], bias[:2, head]]
            found.append((f"{name}.qk", pattern))
            found.append((f"{name}.ov", [joint[:, 2, head], bias[2, head], out[head]]))
        mlp = [weight("mlp.c_fc.weight"), weight("mlp.c_proj.weight")]
        found.append((f"m{layer}", mlp))
    return found


def penalty(model: GPT2LMHeadModel) -> Tensor:
    """The group lasso: the sum of the groups' norms."""
    norms = [
        torch.stack([w.square().sum() for w in weights]).sum().add(1e-8).sqrt()
        for _, weights in groups(model)
    ]
    return torch.stack(norms).sum()


@torch.no_grad()
def prune(
    model: GPT2LMHeadModel, pools: list[Pool], seed: int, slack: float
) -> list[str]:
    """Zero every group that can go, smallest first, while no pool's loss grows much."""
    order = sorted(groups(model), key=lambda g: sum(w.square().sum() for w in g[1]))
    before = _pool_losses(model, pools, seed)
    gone = []
    for name, weights in order:
        kept = [w.clone() for w in weights]
        for weight in weights:
            weight.zero_()
        now = _pool_losses(model, pools, seed)
        if all(a <= b + slack for a, b in zip(now, before, strict=True)):
            gone.append(name)
            continue
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old)
    return gone


def _pool_losses(model: GPT2LMHeadModel, pools: list[Pool], seed: int) -> list[float]:
    draw = torch.Generator().manual_seed(seed)
    return [loss.item() for loss in losses(model, pools, 2000, draw)]


def train(
    model: GPT2LMHeadModel, pools: list[Pool], options: argparse.Namespace
) -> list[str]:
    """Three phases: learn under a growing penalty, prune, train what is left."""
    draw = torch.Generator().manual_seed(options.seed)
    steps = options.steps
    gone: list[str] = []
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=options.rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    prune_at, started = int(steps * 0.8), time.process_time()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        decay = 1.0 - 0.95 * max(0.0, step / steps - 0.5) * 2
        for group in optimizer.param_groups:
            group["lr"] = options.rate * warm * decay
        found = losses(model, pools, options.batch, draw)
        share = [pool.share for pool in pools]
        loss = sum(s * one for s, one in zip(share, found, strict=True))
        ramp = min(1.0, max(0.0, step / steps - 0.15) / 0.3)
        lasso = penalty(model)
        (loss + options.penalty * ramp * lasso).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        _zero(model, gone)
        if step == prune_at:
            gone = prune(model, pools, options.seed, SLACK)
            optimizer.state.clear()
        if step % 100 == 0 or step == steps - 1:
            shown = " ".join(f"{one.item():.3f}" for one in found)
            seconds = time.process_time() - started
            print(
                f"{step:5d} {seconds:5.0f}s  {shown}  lasso {lasso.item():.1f}",
                flush=True,
            )
    return gone


@torch.no_grad()
def _zero(model: GPT2LMHeadModel, names: list[str]) -> None:
    if not names:
        return
    for name, weights in groups(model):
        if name in names:
            for weight in weights:
                weight.zero_()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=embedded_model())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--penalty", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=12000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    tokenizer = make_tokenizer()
    pools = make_pools(tokenizer, options.examples, options.seed)
    sizes = [len(pool) for pool in pools]
    print(
        f"{len(tokenizer)} tokens, pools {sizes}, {time.process_time():.0f}s",
        flush=True,
    )
    model = make_model(len(tokenizer))
    gone = train(model, pools, options)
    print("pruned:", " ".join(gone))
    model.save_pretrained(options.out)
    (options.out / "generation_config.json").unlink()
    (options.out / "model.safetensors").chmod(0o644)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
