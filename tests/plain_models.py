"""The plain way to do it: a Hugging Face model with hooks, one receiver at a time.

Slow and obvious, so that the library can be held against it. Nothing here is shared
with the library but the names of components, and that float64 stays float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from circuitlab.backends.transformer_lens import StayDouble

Receive = Callable[[str, Tensor], Tensor]


@dataclass(frozen=True)
class Layer:
    """One block's modules; `slots` gives each receiver's module and columns."""

    attention_norm: nn.Module
    output: nn.Module
    mlp_norm: nn.Module
    mlp: nn.Module
    slots: dict[str, tuple[nn.Module, slice]]


@dataclass
class PlainModel:
    """Runs with `receive(receiver, x)` deciding what each receiver reads, where `x` is
    its pre-norm input. `senders` holds what every sender added in the last run."""

    model: Any
    layers: list[Layer]
    final_norm: nn.Module
    first_block: nn.Module
    n_heads: int
    senders: dict[str, Tensor] = field(default_factory=dict)

    def run(self, tokens: Tensor, receive: Receive | None = None) -> Tensor:
        """Logits `[example, pos, d_vocab]`."""
        self.senders = {}
        receive = receive or (lambda _, x: x)
        handles = [self.first_block.register_forward_pre_hook(self._input, **_KW)]
        for i, layer in enumerate(self.layers):
            handles += self._hooks(i, layer, receive)
        handles.append(
            self.final_norm.register_forward_pre_hook(
                lambda _m, args: (receive("logits", args[0]),)
            )
        )
        try:
            with StayDouble():
                return self.model(tokens, use_cache=False).logits
        finally:
            for handle in handles:
                handle.remove()

    def _input(self, _module: nn.Module, args: tuple, kwargs: dict) -> None:
        self.senders["input"] = args[0] if args else kwargs["hidden_states"]

    def _hooks(self, i: int, layer: Layer, receive: Receive) -> list:
        stream: dict[str, Tensor] = {}

        def keep(name: str):
            def hook(_module: nn.Module, args: tuple) -> None:
                stream[name] = args[0]

            return hook

        def project(module: nn.Module, _args: tuple, out: Tensor) -> Tensor:
            out = out.clone()
            for name, (own, columns) in layer.slots.items():
                if own is module:
                    normed = _call(
                        layer.attention_norm, receive(name, stream["attention"])
                    )
                    out[..., columns] = _call(module, normed)[..., columns]
            return out

        def write_heads(module: nn.Module, args: tuple) -> None:
            weight: Any = module.weight
            weight = weight.t() if isinstance(module, nn.Linear) else weight
            parts = zip(
                args[0].chunk(self.n_heads, -1),
                weight.chunk(self.n_heads, 0),
                strict=True,
            )
            for h, (z, rows) in enumerate(parts):
                self.senders[f"a{i}.h{h}"] = z @ rows

        def read_mlp(_module: nn.Module, _args: tuple) -> tuple[Tensor]:
            return (_call(layer.mlp_norm, receive(f"m{i}", stream["mlp"])),)

        def write_mlp(_module: nn.Module, _args: tuple, out: Tensor) -> None:
            self.senders[f"m{i}"] = out

        projections = {id(m): m for m, _ in layer.slots.values()}.values()
        return [
            layer.attention_norm.register_forward_pre_hook(keep("attention")),
            *(module.register_forward_hook(project) for module in projections),
            layer.output.register_forward_pre_hook(write_heads),
            layer.mlp_norm.register_forward_pre_hook(keep("mlp")),
            layer.mlp.register_forward_pre_hook(read_mlp),
            layer.mlp.register_forward_hook(write_mlp),
        ]


_KW: Any = {"with_kwargs": True}


def _call(module: nn.Module, x: Tensor) -> Tensor:
    """A module's own forward, without the hooks."""
    return type(module).forward(module, x)


def plain(model: Any) -> PlainModel:
    """The rig for a GPT-2, Llama or GPT-NeoX model of Hugging Face."""
    config = model.config
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None) or heads
    width = config.hidden_size // heads
    match type(model).__name__:
        case "GPT2LMHeadModel":
            blocks, norm = model.transformer.h, model.transformer.ln_f
            make = _gpt2
        case "LlamaForCausalLM":
            blocks, norm, make = model.model.layers, model.model.norm, _llama
        case _:
            blocks = model.gpt_neox.layers
            norm, make = model.gpt_neox.final_layer_norm, _neox
    layers = [make(i, block, heads, groups, width) for i, block in enumerate(blocks)]
    return PlainModel(model, layers, norm, blocks[0], heads)


def _gpt2(i: int, block: Any, heads: int, _groups: int, width: int) -> Layer:
    size = heads * width
    slots = {
        f"a{i}.h{h}<{port}>": (
            block.attn.c_attn,
            slice(p * size + h * width, p * size + (h + 1) * width),
        )
        for h in range(heads)
        for p, port in enumerate("qkv")
    }
    return Layer(block.ln_1, block.attn.c_proj, block.ln_2, block.mlp, slots)


def _llama(i: int, block: Any, heads: int, groups: int, width: int) -> Layer:
    attention = block.self_attn
    grouped = heads != groups
    slots = {}
    for port, count in (("q", heads), ("k", groups), ("v", groups)):
        kind = "kv" if grouped and port != "q" else "h"
        for h in range(count):
            module = getattr(attention, f"{port}_proj")
            columns = slice(h * width, (h + 1) * width)
            slots[f"a{i}.{kind}{h}<{port}>"] = (module, columns)
    return Layer(
        block.input_layernorm,
        attention.o_proj,
        block.post_attention_layernorm,
        block.mlp,
        slots,
    )


def _neox(i: int, block: Any, heads: int, _groups: int, width: int) -> Layer:
    slots = {
        f"a{i}.h{h}<{port}>": (
            block.attention.query_key_value,
            slice((3 * h + p) * width, (3 * h + p + 1) * width),
        )
        for h in range(heads)
        for p, port in enumerate("qkv")
    }
    return Layer(
        block.input_layernorm,
        block.attention.dense,
        block.post_attention_layernorm,
        block.mlp,
        slots,
    )


def with_ablated(
    rig: PlainModel, ablated: dict[str, Tensor], circuit: set[str], edges: set[str]
) -> Receive:
    """Every edge outside the circuit carries its ablated value."""

    def receive(name: str, x: Tensor) -> Tensor:
        for sender, value in list(rig.senders.items()):
            edge = f"{sender}->{name}"
            if edge in edges and edge not in circuit:
                x = x + (ablated[sender] - value)
        return x

    return receive
