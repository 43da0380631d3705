"""The golden toy GPT-2, its prompts, and the peers' arrays by edge."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from safetensors.torch import load_file

from circuitlab.backends import load_model
from circuitlab.circuits import Circuit
from circuitlab.prompts import Prompts

FOLDER = Path(__file__).parent / "golden" / "gpt2_toy"


@cache
def arrays() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "gpt2_toy.npz") as found:
        return dict(found)


@cache
def _index() -> dict[str, Any]:
    return json.loads((FOLDER / "index.json").read_text(encoding="utf-8"))


def hf_toy() -> Any:
    text = (FOLDER / "gpt2_toy.config.json").read_text(encoding="utf-8")
    values = json.loads(text)
    values = {k: v for k, v in values.items() if not k.startswith("architecture")}
    config = hf.GPT2Config(**values)
    config._attn_implementation = "eager"
    model = hf.GPT2LMHeadModel(config).eval()
    weights = load_file(FOLDER / "gpt2_toy.safetensors")
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


@cache
def toy(dtype: torch.dtype = torch.float32) -> Any:
    return load_model(hf_toy(), dtype=dtype)


def toy_prompts() -> Prompts:
    found = arrays()
    labels = found["labels"]
    return Prompts.from_tokens(
        found["clean"], found["corrupt"], labels[:, 0], labels[:, 1]
    )


def by_edge(name: str) -> np.ndarray:
    """An array [sender, receiver] of the peers, in our order of edges."""
    index, matrix = _index(), arrays()[name]
    rows = {name: i for i, name in enumerate(index["forward_nodes"])}
    columns = {name: i for i, name in enumerate(index["backward_nodes"])}
    pairs = [edge.split("->") for edge in toy().shape.edge_names]
    return np.array([matrix[rows[u], columns[v]] for u, v in pairs])


def peer_circuit(name: str) -> Circuit:
    kept = by_edge(name) != 0
    edges = np.array(toy().shape.edge_names)[kept]
    return Circuit.from_edges(edges.tolist())
