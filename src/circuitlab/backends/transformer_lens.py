"""The backend over a TransformerLens 4 `TransformerBridge`.

It addresses the bridge's own modules (projections, norms, MLPs) rather than its gated
hooks: those outputs are the tensors that are really on the autograd path, on every
architecture. Hooks live inside one `run`; the model is never left changed.
"""

from __future__ import annotations

import hashlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from circuitlab.backends import Capability, LayerSites, Point, Site, Tap, TokenBatch
from circuitlab.backends.binding import bound
from circuitlab.backends.points import flags, hook_points
from circuitlab.errors import DataError, ModelError
from circuitlab.norms import Norm
from circuitlab.sites import ModelShape
from circuitlab.tables import ModelInfo

FULL_CAPABILITIES = frozenset(Capability)


class TransformerLensModel:
    """A loaded bridge: its shape, its sites, and `run`.

    Make one with `circuitlab.load_model`, which also probes it.
    """

    def __init__(
        self,
        bridge: Any,
        shape: ModelShape,
        layers: tuple[LayerSites, ...],
        *,
        tokenizer: Any = None,
        name: str = "model",
        processing: str = "raw",
        blocks_return_tuples: bool = False,
    ):
        self.bridge = bridge
        self.shape = shape
        self.layers = layers
        self.tokenizer = tokenizer
        self.name = name
        self.processing = processing
        self.blocks_return_tuples = blocks_return_tuples
        self.capabilities = FULL_CAPABILITIES
        self.stream = Site("blocks.0", "in")
        self.final_stream = Site("ln_final", "in")
        self.final_out = Site("ln_final", "out")
        # The wrapped model is no child of the bridge, and holds dropout of its own.
        owners = (bridge, bridge.original_model)
        self._modules = list(dict.fromkeys(m for o in owners for m in o.modules()))
        self._running = threading.RLock()
        self._freezing = 0
        self._frozen: list[nn.Parameter] = []
        self._digest: tuple[tuple[int, ...], str] | None = None
        self._facts: dict[tuple[str, tuple[bool, ...]], Any] = {}

    def __repr__(self) -> str:
        shape = self.shape
        return (
            f"{type(self).__name__}({self.name!r}, {shape.n_layers} layers, "
            f"{shape.n_heads} heads, {shape.n_edges:,} edges)"
        )

    @property
    def device(self) -> torch.device:
        return next(self.bridge.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.bridge.parameters()).dtype

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            name=self.name,
            architecture=str(self.bridge.cfg.architecture),
            weights_digest=self.weights_digest,
            dtype=str(self.dtype).removeprefix("torch."),
            backend="transformer_lens",
            shape=self.shape,
            processing=self.processing,
            device=str(self.device),
        )

    @property
    def weights_digest(self) -> str:
        """SHA-256 over names and values of the parameters; redone when they change."""
        named = [*self.bridge.original_model.named_parameters()]
        state = tuple(v for _, p in named for v in (p.data_ptr(), p._version))
        if self._digest is None or self._digest[0] != state:
            self._digest = (state, _digest_weights(named))
        return self._digest[1]

    # --- names ---

    def points(self) -> tuple[Point, ...]:
        """The bridge's hook points, grouped by identity, in its own order."""
        return hook_points(self.bridge)

    def remembered(self, what: str, find: Callable[[], Any]) -> Any:
        """A fact about the model, found once for as long as the bridge's flags stand."""
        key = (what, flags(self.bridge))
        if key not in self._facts:
            self._facts[key] = find()
        return self._facts[key]

    # --- tokens ---

    def batch(
        self,
        rows: Sequence[Sequence[int]],
        answers: Sequence = (),
        wrong_answers: Sequence = (),
        *,
        padding_side: Literal["left", "right"] = "right",
    ) -> TokenBatch:
        """Pad token rows into one batch; padding is masked and never read.

        Raises DataError `token_outside_vocabulary`, `prompt_too_long`.
        """
        self._check_rows(rows)
        length = max(len(row) for row in rows)
        tokens = torch.zeros(len(rows), length, dtype=torch.int64)
        mask = torch.zeros(len(rows), length, dtype=torch.bool)
        for i, row in enumerate(rows):
            start = length - len(row) if padding_side == "left" else 0
            tokens[i, start : start + len(row)] = torch.tensor(row, dtype=torch.int64)
            mask[i, start : start + len(row)] = True
        sizes = mask.sum(1)
        last = torch.full_like(sizes, length - 1)
        if padding_side == "right":
            last = sizes - 1
        return TokenBatch(
            tokens.to(self.device),
            mask.to(self.device),
            last.to(self.device),
            tuple(answers),
            tuple(wrong_answers),
        )

    def _check_rows(self, rows: Sequence[Sequence[int]]) -> None:
        size, longest = self.shape.d_vocab, self._longest
        for i, row in enumerate(rows):
            outside = [token for token in row if not 0 <= token < size]
            if outside:
                raise DataError(
                    "token_outside_vocabulary",
                    f"row {i} has token {outside[0]}, and this model's "
                    f"vocabulary ends at {size - 1}; use this model's own tokenizer",
                    row=i,
                    value=outside[0],
                    expected=f"0..{size - 1}",
                )
            if longest is not None and len(row) > longest:
                raise DataError(
                    "prompt_too_long",
                    f"row {i} has {len(row)} tokens, and this model has "
                    f"{longest} positions; use shorter prompts",
                    row=i,
                    value=len(row),
                    expected=f"<= {longest}",
                )

    @property
    def _longest(self) -> int | None:
        """The positions of a model that has a table of them."""
        table = getattr(self.bridge, "pos_embed", None)
        return None if table is None else int(self.bridge.cfg.n_ctx)

    # --- running ---

    def run(
        self,
        batch: TokenBatch,
        taps: Sequence[Tap] = (),
        *,
        grad: bool = False,
        positions: Tensor | None = None,
        resume: tuple[int, Tensor] | None = None,
        fast_norms: bool = True,
    ) -> Tensor:
        """Run one pass and return the logits; see `Backend.run`.

        `fast_norms` computes norms that nobody hooks in one fused call each. A float64
        model stays float64 throughout, also where the architecture rounds to float32.
        """
        taps = list(taps)
        if positions is not None:
            taps.append(Tap(Site("unembed", "in"), _gather(positions)))
        if resume is not None:
            taps = [*self._resume_taps(*resume), *taps]
        padded = not bool(batch.mask.all())
        with ExitStack() as stack:
            # One pass at a time: what is installed on modules is seen by every thread.
            stack.enter_context(self._running)
            if fast_norms:
                taps = [*self._norm_taps(taps), *taps]
            stack.enter_context(torch.set_grad_enabled(grad))
            stack.enter_context(_eval_mode(self._modules))
            if self.dtype == torch.float64:
                stack.enter_context(StayDouble())
            rows, length = batch.tokens.shape
            for tap in taps:
                apart = _unflattened(tap.fn, lambda: (rows, length))
                fn = tap.fn if tap.raw else apart
                module = self.module(tap.site.path)
                stack.enter_context(_installed(module, tap.site.slot, fn))
            return self.bridge(
                batch.tokens,
                attention_mask=batch.mask.long() if padded else None,
                prepend_bos=False,
                use_cache=False,
            )

    def bound(
        self,
        taps: Sequence[Tap],
        begin: Callable[[TokenBatch], None],
        end: Callable[[], None],
    ) -> AbstractContextManager[None]:
        """Install taps on the bridge for the length of a `with`, also for calls of the
        bridge that circuitlab doesn't make; `begin` gets each forward's tokens."""

        def install(tap: Tap, shape: Callable[[], tuple[int, ...]]):
            fn = _unflattened(tap.fn, shape)
            return _installed(self.module(tap.site.path), tap.site.slot, fn)

        return bound(self.bridge.original_model, taps, install, begin, end)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """No parameter asks for a gradient inside; the flags are put back after, by
        whoever leaves last where several threads are inside."""
        try:
            self._freeze(1)
            yield
        finally:
            self._freeze(-1)

    def _freeze(self, change: int) -> None:
        with self._running:
            self._freezing = max(0, self._freezing + change)
            if self._freezing == 0:
                for parameter in self._frozen:
                    parameter.requires_grad_(True)
                self._frozen = []
            elif change > 0:
                asking = [p for p in self.bridge.parameters() if p.requires_grad]
                self._frozen += asking
                for parameter in asking:
                    parameter.requires_grad_(False)

    def module(self, path: str) -> nn.Module:
        """The bridge's module at a dotted path."""
        found: Any = self.bridge
        for part in path.split("."):
            found = found[int(part)] if part.isdigit() else getattr(found, part)
        return found

    def bypass(self, layer: int) -> Tap:
        """A tap that lets the stream pass a block without running it."""
        skip: Any = _pass_in_tuple if self.blocks_return_tuples else _pass_through
        return Tap(Site(f"blocks.{layer}", "instead"), skip)

    def _resume_taps(self, layer: int, stream: Tensor) -> list[Tap]:
        skipped = [self.bypass(i) for i in range(layer)]
        return [*skipped, Tap(Site(f"blocks.{layer}", "in"), lambda _: stream)]

    def _norm_taps(self, taps: Sequence[Tap]) -> list[Tap]:
        replaced = {tap.site.path for tap in taps if tap.site.slot == "instead"}
        replaced |= {tap.site.path.rpartition(".hook_")[0] for tap in taps}
        return [
            Tap(Site(path, "instead"), norm)
            for path, norm in self._norms().items()
            if path not in replaced and not _hooked(self.module(path))
        ]

    def _norms(self) -> dict[str, Norm]:
        found = {}
        for layer, _ in enumerate(self.layers):
            block: Any = self.module(f"blocks.{layer}")
            for name in ("ln1", "ln2", "ln1_post", "ln2_post"):
                if name in block.submodules:
                    path = f"blocks.{layer}.{name}"
                    found[path] = norm_of(self.module(path))
        found["ln_final"] = norm_of(self.module("ln_final"))
        return found

    # --- parameters ---

    def norm(self, layer: int, reader: Literal["attention", "mlp"]) -> Norm:
        """The norm before a block's attention or MLP."""
        sites = self.layers[layer]
        stream = sites.attention_stream if reader == "attention" else sites.mlp_stream
        assert stream is not None
        return self._norm_at(stream)

    def final_norm(self) -> Norm:
        return self._norm_at(self.final_stream)

    def _norm_at(self, stream: Site) -> Norm:
        module = self.module(stream.path)
        is_norm = stream.path.rsplit(".", 1)[-1].startswith("ln")
        return norm_of(module) if is_norm else Norm("none")

    def projection(self, layer: int, port: str) -> tuple[Tensor, Tensor | None]:
        """A port's weight `[head, d_head, d_model]` and bias `[head, d_head]`."""
        module = self.module(f"blocks.{layer}.attn.{port}")
        weight, bias = _weight_out_in(module)
        heads = self.shape.n_heads if port == "q" else self.shape.n_kv_heads
        bias = None if bias is None else bias.reshape(heads, -1)
        return weight.reshape(heads, -1, weight.shape[-1]), bias

    def output_projection(self, layer: int) -> tuple[Tensor, Tensor | None]:
        """W_O `[head, d_head, d_model]`, its bias, with a post-norm's γ folded in."""
        weight, bias = _weight_out_in(self.module(f"blocks.{layer}.attn.o"))
        scale = self._residual_scale(layer)
        post = self.layers[layer].attention_post
        if post is not None:
            gamma = norm_of(self.module(post)).weight
            weight = weight if gamma is None else weight * gamma[:, None]
        per_head = weight.t().reshape(self.shape.n_heads, -1, weight.shape[0]) * scale
        return per_head, None if bias is None else bias * scale

    def _residual_scale(self, layer: int) -> float:
        block = self.module(f"blocks.{layer}")
        return float(getattr(block, "residual_contribution_scale", 1.0))

    def mlp_scale(self, layer: int) -> float:
        """What a block multiplies its MLP's output by before adding it."""
        return self._residual_scale(layer)

    def post_scale(self, layer: int, attention_out: Tensor) -> Tensor | None:
        """The post-norm's scale r `[..., 1]` at the attention output of this run."""
        post = self.layers[layer].attention_post
        if post is None:
            return None
        return norm_of(self.module(post)).statistics(attention_out)[1]


def norm_of(module: Any) -> Norm:
    """Read a norm module's kind and parameters."""
    inner = module.original_component
    if isinstance(inner, nn.Identity):
        return Norm("none")
    if not hasattr(module, "uses_rms_norm"):
        raise ModelError(
            "architecture_unsupported",
            f"the norm {module.name} is a {type(inner).__name__}, whose derivative "
            "circuitlab does not know",
            value=type(inner).__name__,
        )
    kind = "rms" if module.uses_rms_norm else "layer"
    weight = getattr(inner, "weight", None)
    if weight is not None and module.uses_weight_offset:
        weight = 1.0 + weight
    bias = getattr(inner, "bias", None) if kind == "layer" else None
    return Norm(kind, weight, bias, _epsilon(module, inner))


def _epsilon(module: Any, inner: Any) -> float:
    for name in ("eps", "variance_epsilon"):
        value = getattr(inner, name, None)
        if value is not None:
            return float(value)
    return float(getattr(module.config, "eps", 1e-5))


def _weight_out_in(module: Any) -> tuple[Tensor, Tensor | None]:
    """A linear module's weight as `[out, in]`, whatever its layout."""
    inner = module.original_component
    weight = inner.weight
    if not isinstance(inner, nn.Linear) and type(inner).__name__ == "Conv1D":
        weight = weight.t()
    elif not isinstance(inner, nn.Linear):
        raise ModelError(
            "architecture_unsupported",
            f"the projection {module.name} is a {type(inner).__name__}, not a linear "
            "map, so its heads can't be told apart",
            value=type(inner).__name__,
        )
    return weight, getattr(inner, "bias", None)


def _digest_weights(named: Sequence[tuple[str, Tensor]]) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(named, key=lambda item: item[0]):
        found.update(name.encode())
        data = parameter.detach().cpu().contiguous().reshape(-1)
        found.update(data.view(torch.uint8).numpy().data)
    return found.hexdigest()


def _gather(positions: Tensor) -> Callable[[Tensor], Tensor]:
    index = positions[:, None] if positions.ndim == 1 else positions

    def gather(hidden: Tensor) -> Tensor:
        wide = index[..., None].expand(-1, -1, hidden.shape[-1])
        return hidden.gather(1, wide)

    return gather


def _pass_through(value: Tensor) -> Tensor:
    return value


def _pass_in_tuple(value: Tensor) -> tuple[Tensor]:
    return (value,)


def _hooked(module: Any) -> bool:
    names = ("hook_in", "hook_out", "hook_normalized", "hook_scale")
    points = [getattr(module, name, None) for name in names]
    if module._forward_hooks or module._backward_hooks:
        return True
    return any(p is not None and (p.fwd_hooks or p.bwd_hooks) for p in points)


class StayDouble(TorchFunctionMode):
    """Float64 tensors stay float64: casts of theirs to float32 do nothing.

    Architectures compute norms, rotations and softmaxes in float32 on purpose, to be
    better than half precision. For float64 models that would be worse, and would hide
    identities that hold to 1e-10 behind rounding of 1e-7.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        del types
        kwargs = dict(kwargs or {})
        value = args[0] if args else None
        if isinstance(value, Tensor) and value.dtype == torch.float64:
            if func is Tensor.float:
                return value
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
            args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        return func(*args, **kwargs)


@contextmanager
def _eval_mode(modules: Sequence[nn.Module]) -> Iterator[None]:
    training = [module for module in modules if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _unflattened(fn: Callable, shape: Callable[[], tuple[int, ...]]) -> Callable:
    """Give `fn` rows and positions apart, also where a block merges them (OPT)."""

    def apart(value: Tensor) -> Any:
        rows, length = shape()
        if value.ndim != 2 or value.shape[0] != rows * length:
            return fn(value)
        new = fn(value.unflatten(0, (rows, length)))
        return new.flatten(0, 1) if isinstance(new, Tensor) else new

    return apart


@contextmanager
def _installed(module: nn.Module, slot: str, fn: Callable) -> Iterator[None]:
    """Install a tap's function on a module for the length of the `with`."""
    if slot == "instead":
        yield from _instead(module, fn)
        return
    if type(module).__name__ == "HookPoint":
        yield from _at_point(module, fn)
        return
    if slot == "in":
        handle = module.register_forward_pre_hook(_before(fn), with_kwargs=True)
    else:
        handle = module.register_forward_hook(_after(fn))
    try:
        yield
    finally:
        handle.remove()


def _at_point(point: Any, fn: Callable) -> Iterator[None]:
    """Install on a hook point, seen in its `fwd_hooks`: a norm computes its inner values
    on the autograd path only if it sees a hook there. An edit of them makes it warn that
    it recomputes its output from the edited value, which is what was asked for."""
    from transformer_lens.hook_points import LensHandle

    handle = LensHandle(point.register_forward_hook(_after(fn)))
    point.fwd_hooks.append(handle)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*hook_(scale|normalized).*")
            yield
    finally:
        handle.hook.remove()
        if handle in point.fwd_hooks:
            point.fwd_hooks.remove(handle)


def _instead(module: nn.Module, fn: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")

    def forward(*args, **kwargs):
        return fn(args[0] if args else kwargs["hidden_states"])

    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def _before(fn: Callable) -> Callable:
    def hook(_module, args, kwargs):
        if args:
            new = fn(args[0])
            return None if new is None else ((new, *args[1:]), kwargs)
        new = fn(kwargs["hidden_states"])
        return None if new is None else (args, {**kwargs, "hidden_states": new})

    return hook


def _after(fn: Callable) -> Callable:
    def hook(_module, _args, output):
        if isinstance(output, tuple):
            new = fn(output[0])
            return None if new is None else (new, *output[1:])
        return fn(output)

    return hook
