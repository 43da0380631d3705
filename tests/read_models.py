"""Tiny random models for the tests of reads, in float64, and their prompts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers

from circuitlab.backends import Backend, load_model

VOCAB, WIDTH = 61, 32
TOKENS = ((1, 2, 3, 4, 5), (3, 4, 5, 6, 7), (9, 1, 8, 2, 6))
OTHERS = ((1, 2, 8, 4, 5), (3, 4, 9, 6, 7), (9, 1, 5, 2, 6))


def _config(family: str) -> Any:
    wide: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
    }
    grouped = {**wide, "num_key_value_heads": 2}
    match family:
        case "gpt2":
            return transformers.GPT2Config(
                vocab_size=VOCAB,
                n_embd=WIDTH,
                n_layer=2,
                n_head=4,
                n_inner=48,
                n_positions=64,
            )
        case "llama":
            return transformers.LlamaConfig(**grouped)
        case "neox" | "neox_sequential":
            parallel = family == "neox"
            return transformers.GPTNeoXConfig(**wide, use_parallel_residual=parallel)
        case "gemma2":
            return transformers.Gemma2Config(
                **grouped, head_dim=8, query_pre_attn_scalar=8
            )
        case "olmo2":
            return transformers.Olmo2Config(**grouped)
        case "opt":
            return transformers.OPTConfig(
                vocab_size=VOCAB,
                hidden_size=WIDTH,
                num_hidden_layers=2,
                num_attention_heads=4,
                ffn_dim=48,
                max_position_embeddings=64,
                word_embed_proj_dim=WIDTH,
            )
        case "bloom":
            return transformers.BloomConfig(
                vocab_size=VOCAB, hidden_size=WIDTH, n_layer=2, n_head=4
            )
        case "phi":
            return transformers.PhiConfig(**wide)
        case "mixtral":
            return transformers.MixtralConfig(**grouped, num_local_experts=4)
        case _:
            raise ValueError(family)


def huggingface(family: str, dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """A random model, with weights large enough that nothing is nearly linear."""
    config = _config(family)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager"
    )
    model = model.eval().to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            if parameter.ndim > 1:
                parameter.copy_(noise * 0.25)
            elif "bias" in name:
                parameter.copy_(noise * 0.1)
            else:
                parameter.add_(noise * 0.1)
    return model


@cache
def model(family: str = "gpt2", dtype: torch.dtype = torch.float64) -> Backend:
    """A loaded tiny model; tests leave it as it was."""
    return load_model(huggingface(family, dtype))
