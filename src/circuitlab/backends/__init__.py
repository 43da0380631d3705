"""The seam to the model: one narrow protocol that every stage runs through.

A backend runs token batches and lets *taps* observe or replace named tensors on the
way. Everything that circuitlab does to a forward pass is a tap; taps live for one pass.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from circuitlab.errors import ArgumentError
from circuitlab.norms import Norm
from circuitlab.sites import ModelShape, site_key
from circuitlab.tables import ModelInfo

Slot = Literal["in", "out", "instead"]


class Capability(enum.Enum):
    """Facts about a loaded model, checked by running it."""

    GRADIENTS = "gradients"
    PER_HEAD = "per_head"
    ROW_BATCHING = "row_batching"
    RESUME = "resume"
    ATTENTION_PATTERN = "attention_pattern"


@dataclass(frozen=True)
class Site:
    """One named tensor of the forward pass: a module's input or output."""

    path: str
    slot: Slot = "out"

    @property
    def key(self) -> str:
        return site_key(self.path, self.slot)


@dataclass(frozen=True)
class Tap:
    """Observe or replace one site: `fn(value)` returns None, or the new value.

    At slot `instead` the module does not run: `fn(input)` gives its output. `raw` gives
    `fn` the very tensor that flows, also where a block merges rows and positions.
    """

    site: Site
    fn: Callable[[Tensor], Tensor | None]
    raw: bool = False


@dataclass(frozen=True)
class Point:
    """A named tensor that the model offers: `name` is its module's path too.

    `spellings` are all its names, the canonical one first. `gate` is the call that
    would make it fire, where a flag keeps it from firing. `readonly`: writing there
    breaks the model's own code.
    """

    name: str
    spellings: tuple[str, ...]
    gate: str | None = None
    readonly: bool = False


@dataclass(frozen=True)
class TokenBatch:
    """Token rows of one length, with what a metric needs to read the logits.

    `tokens` int64 and `mask` bool, `[example, pos]`; `last` int64 `[example]`, each
    row's last real token. `answers` and `wrong_answers` are per example a tuple of
    answers, each a tuple of token ids. `clean_logits` are the full model's clean ones:
    `[example, d_vocab]` at `last`, or `[example, pos, d_vocab]` for a metric that reads
    all positions. `numbers` says which prompts of their set the rows are, for errors.
    """

    tokens: Tensor
    mask: Tensor
    last: Tensor
    answers: tuple[tuple[tuple[int, ...], ...], ...] = ()
    wrong_answers: tuple[tuple[tuple[int, ...], ...], ...] = ()
    clean_logits: Tensor | None = None
    numbers: tuple[int, ...] = ()

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def number(self, row: int) -> int:
        """Which prompt of its set a row is."""
        return self.numbers[row] if self.numbers else row

    def repeat(self, copies: int) -> TokenBatch:
        """Stack `copies` of the rows, copy by copy."""
        return replace(
            self,
            tokens=self.tokens.repeat(copies, 1),
            mask=self.mask.repeat(copies, 1),
            last=self.last.repeat(copies),
            answers=self.answers * copies,
            wrong_answers=self.wrong_answers * copies,
            clean_logits=_repeat_rows(self.clean_logits, copies),
            numbers=self.numbers * copies,
        )


def _repeat_rows(value: Tensor | None, copies: int) -> Tensor | None:
    if value is None:
        return None
    return value.repeat(copies, *[1] * (value.ndim - 1))


@dataclass(frozen=True)
class LayerSites:
    """Where one block's senders and receivers are read. None: the block lacks it.

    `attention_stream` and `mlp_stream` are the pre-norm inputs; `z` is the per-head
    value before the output projection; `attention_post` is a post-norm's module path.
    `mlp_apart`: between its two sites the MLP is one module that takes any tokens.
    """

    attention_stream: Site
    q: Site
    k: Site
    v: Site
    z: Site
    attention_out: Site
    attention_post: str | None
    mlp_stream: Site | None
    mlp_in: Site | None
    mlp_out: Site | None
    mlp_apart: bool = False


class Backend(Protocol):
    """What the science needs of a loaded model."""

    shape: ModelShape
    capabilities: frozenset[Capability]
    tokenizer: Any
    layers: tuple[LayerSites, ...]
    stream: Site
    final_stream: Site
    final_out: Site

    @property
    def info(self) -> ModelInfo: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def batch(
        self,
        rows: Sequence[Sequence[int]],
        answers: Sequence = (),
        wrong_answers: Sequence = (),
        *,
        padding_side: Literal["left", "right"] = "right",
    ) -> TokenBatch:
        """Pad token rows into one batch on the model's device.

        Raises DataError `token_outside_vocabulary`, `prompt_too_long`.
        """
        ...

    def run(
        self,
        batch: TokenBatch,
        taps: Sequence[Tap] = (),
        *,
        grad: bool = False,
        positions: Tensor | None = None,
        resume: tuple[int, Tensor] | None = None,
    ) -> Tensor:
        """Run one pass and return the logits.

        `positions` int64 `[example]` or `[example, k]`: unembed only these, giving
        `[example, k, d_vocab]` (k = 1 for a vector); None gives `[example, pos,
        d_vocab]`. `resume=(layer, stream)` starts at that block from the given input
        `[example, pos, d_model]`; earlier blocks do not run.
        """
        ...

    def bypass(self, layer: int) -> Tap:
        """A tap that lets the stream pass a block without running it."""
        ...

    def points(self) -> tuple[Point, ...]:
        """The named tensors, grouped by identity, in the model's own order."""
        ...

    def remembered(self, what: str, find: Callable[[], Any]) -> Any:
        """A fact about the model, found once for as long as its flags stand."""
        ...

    def bound(
        self,
        taps: Sequence[Tap],
        begin: Callable[[TokenBatch], None],
        end: Callable[[], None],
    ) -> AbstractContextManager[None]:
        """Install taps for the length of a `with`, also for the user's own calls of the
        model; `begin` gets each forward's tokens, `end` is called after it."""
        ...

    def frozen(self) -> AbstractContextManager[None]:
        """No parameter asks for a gradient inside; the flags are put back after."""
        ...

    def norm(self, layer: int, reader: Literal["attention", "mlp"]) -> Norm: ...

    def final_norm(self) -> Norm: ...

    def projection(self, layer: int, port: str) -> tuple[Tensor, Tensor | None]:
        """A port's weight `[head, d_head, d_model]` and bias `[head, d_head]`."""
        ...

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O `[head, d_head, d_model]` and its bias `[d_model]`, residual scale in."""
        ...

    def mlp_scale(self, layer: int) -> float:
        """What a block multiplies its MLP's output by before adding it."""
        ...

    def post_scale(self, layer: int, attention_out: Tensor) -> Tensor | None:
        """The post-norm's scale r `[..., 1]` of this run; None without a post-norm.

        Its weight is folded into `output_projection`, so a head adds `r·z·W_O`.
        """
        ...


def require(model: Backend, *needed: Capability) -> None:
    """Refuse with `capability_missing`, naming it, unless the model has them all."""
    for capability in needed:
        if capability not in model.capabilities:
            raise ArgumentError(
                "capability_missing",
                f"this model lacks {capability.name}, which this method needs",
                missing=capability.name,
                available=sorted(c.name for c in model.capabilities),
            )


def load_model(
    spec: Any,
    *,
    tokenizer: Any = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    ungroup_kv: bool = False,
) -> Backend:
    """Load a model and probe it; return the backend that runs it.

    `spec` is a hub name, a local folder, a GGUF file, a Hugging Face model object (also
    inside an nnsight model) or a ready `TransformerBridge`; `"embedded"` is the small
    model that circuitlab ships.
    Weights stay raw (no folding). `ungroup_kv` repeats the key and value weights of a
    grouped-query model into an equivalent multi-head one.

    Raises ModelError: `model_not_found`, `model_file_missing`, `model_unreadable`,
    `model_without_weights`, `model_has_edits`, `architecture_unsupported` (with the
    reason), `model_probe_failed` (with numbers), `ungroup_unsupported`; ArgumentError `dtype_unknown`, `device_unavailable`.
    """
    from circuitlab.backends.loading import load

    return load(
        spec,
        tokenizer=tokenizer,
        device=device,
        dtype=dtype,
        revision=revision,
        trust_remote_code=trust_remote_code,
        ungroup_kv=ungroup_kv,
    )


def as_backend(model: Any) -> Backend:
    """Return a loaded model as it is; load anything else that `load_model` takes."""
    if hasattr(model, "capabilities") and hasattr(model, "layers"):
        return model
    return load_model(model)
