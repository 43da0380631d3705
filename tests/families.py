"""Tiny random-weight models of every architecture family, and prompts for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn

from circuitlab.backends import load_model
from circuitlab.prompts import Prompts

VOCAB, WIDTH, LAYERS, HEADS = 61, 32, 2, 4

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": LAYERS,
    "n_head": HEADS,
}
_NO_IDS: dict[str, Any] = {
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(**_GPT2, n_inner=48, n_positions=64, **_NO_IDS),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=HEADS,
        intermediate_size=48,
        max_position_embeddings=64,
        attention_types=[[["global", "local"], 1]],
        window_size=4,
        **_NO_IDS,
    ),
    "gptj": lambda: hf.GPTJConfig(
        **_GPT2, n_inner=48, n_positions=64, rotary_dim=4, **_NO_IDS
    ),
    "neox_parallel": lambda: hf.GPTNeoXConfig(**_COMMON, use_parallel_residual=True),
    "neox_sequential": lambda: hf.GPTNeoXConfig(**_COMMON, use_parallel_residual=False),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        ffn_dim=48,
        max_position_embeddings=64,
        word_embed_proj_dim=WIDTH,
    ),
    "bloom": lambda: hf.BloomConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, n_layer=LAYERS, n_head=HEADS
    ),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=4),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=8),
    "gemma": lambda: hf.GemmaConfig(**_GROUPED, head_dim=8),
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(
        **_GROUPED, head_dim=8, query_pre_attn_scalar=8, sliding_window=4
    ),
    "phi": lambda: hf.PhiConfig(**_COMMON),
    "phi3": lambda: hf.Phi3Config(**_GROUPED, pad_token_id=0),
    "olmo": lambda: hf.OlmoConfig(**_GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED, pad_token_id=0),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED),
    "granite": lambda: hf.GraniteConfig(**_GROUPED, residual_multiplier=0.5),
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, num_local_experts=4),
}

GROUPED = ("llama", "qwen2", "gemma2", "phi3", "olmo2")


def hf_model(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A Hugging Face model with enlarged random weights and non-zero biases."""
    config = FAMILIES[family]()
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            size = 0.2 if parameter.ndim > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * size)
    return model.eval().to(dtype)


def family_model(
    family: str, dtype: torch.dtype = torch.float64, **options: Any
) -> Any:
    """The backend of a family's tiny model."""
    return load_model(hf_model(family, dtype), **options)


def native_bridge(dtype: torch.dtype = torch.float64, **options: Any) -> nn.Module:
    """TransformerLens' own small model, as a ready bridge."""
    from transformer_lens.config import TransformerBridgeConfig
    from transformer_lens.model_bridge import TransformerBridge

    config = TransformerBridgeConfig(
        d_model=WIDTH,
        d_head=8,
        n_heads=HEADS,
        n_layers=LAYERS,
        n_ctx=32,
        d_vocab=VOCAB,
        d_mlp=48,
        act_fn="gelu",
        architecture="TransformerLensNative",
        **options,
    )
    torch.manual_seed(0)
    boot: Any = TransformerBridge
    return boot.boot_native(config).to(dtype)


def token_prompts(n: int = 3, length: int = 7, seed: int = 0) -> Prompts:
    """Random pairs of equal length that differ from the second token on."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> torch.Tensor:
        return torch.randint(1, VOCAB, size, generator=generator)

    clean = draw(n, length)
    corrupted = clean.clone()
    corrupted[:, 1:4] = draw(n, 3)
    return Prompts.from_tokens(clean, corrupted, draw(n), draw(n))
