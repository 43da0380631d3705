"""What the Reads page draws: ACT rows, or the sums of edge scores, as grids."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from view import Ranked

from circuitlab.sites import parse_edge

_BLOCK = re.compile(r"blocks[./](\d+)[./]?(.*)")
_HEAD = re.compile(r"(?:head[= ]?|h)?(\d+)")
AXES = ("site", "position", "head", "example")


def with_places(rows: pd.DataFrame) -> pd.DataFrame:
    """ACT rows with `layer`, `what` (the site within its block), `head`, `example`."""
    found = [_BLOCK.fullmatch(site) for site in rows["site"].fillna("")]
    layers = [int(m[1]) if m else -1 for m in found]
    whats = [m[2] if m else site for m, site in zip(found, rows["site"], strict=True)]
    heads = pd.array([_head(element) for element in rows["element"]], dtype="Int64")
    return rows.assign(
        layer=layers, what=whats, head=heads, example=rows["sample_id"]
    ).astype({"position": "Int64"})


def _head(element: object) -> int | None:
    match = _HEAD.fullmatch(element) if isinstance(element, str) else None
    return int(match[1]) if match else None


def axes(rows: pd.DataFrame) -> list[str]:
    """What the rows can be spread over."""
    known = {
        "site": "what",
        "position": "position",
        "head": "head",
        "example": "example",
    }
    return [a for a in AXES if a == "site" or rows[known[a]].notna().any()]


def grid(
    rows: pd.DataFrame, axis: str, tokens: Sequence[str] = ()
) -> tuple[pd.DataFrame, list[str]]:
    """Scores by layer and by the axis: columns `layer`, `x`, `score`, and x's order.

    Rows that fall together are summed. Sites outside the blocks stand at layer −1.
    """
    column = {"site": "what"}.get(axis, axis)
    kept = rows.dropna(subset=[column, "score"])
    kept = kept[kept["layer"] >= 0] if axis != "site" else kept
    summed = kept.groupby(["layer", column], sort=False)["score"].sum().reset_index()
    if axis == "site":
        order = list(dict.fromkeys(kept["what"]))
        summed["x"] = summed[column]
    else:
        numbers = sorted(summed[column].unique(), key=lambda v: (len(str(v)), str(v)))
        names = {n: _label(axis, n, tokens) for n in numbers}
        order = [names[n] for n in numbers]
        summed["x"] = summed[column].map(names)
    summed["layer"] = summed["layer"].map(lambda n: "outside" if n < 0 else str(n))
    return summed[["layer", "x", "score"]], order


def _label(axis: str, number: Any, tokens: Sequence[str]) -> str:
    if axis == "position" and int(number) < len(tokens):
        return f"{number}  {tokens[int(number)].strip() or '␣'}"
    return f"h{number}" if axis == "head" else str(number)


def layers_of(names: Sequence[str]) -> list[str]:
    """Layers in order, the first at the bottom."""
    numbers = sorted({int(n) for n in names if n != "outside"}, reverse=True)
    return [*map(str, numbers), *(["outside"] if "outside" in names else [])]


def sender_grid(ranked: Ranked) -> tuple[pd.DataFrame, list[str]]:
    """Every component's support, the sum over the edges that leave it, by layer: heads,
    and the MLP as a column of its own."""
    totals: dict[str, float] = {}
    supports = np.nan_to_num(ranked.supports)
    for name, support in zip(ranked.names, supports.tolist(), strict=True):
        sender = name.partition("->")[0]
        totals[sender] = totals.get(sender, 0.0) + support
    rows = []
    for name, total in totals.items():
        part = parse_edge(f"{name}->logits").sender
        if part.layer is None:
            continue
        x = (
            f"h{part.head}"
            if part.kind == "head"
            else {"mlp": "MLP"}.get(part.kind, "attn")
        )
        rows.append({"layer": str(part.layer), "x": x, "score": total})
    heads = [f"h{i}" for i in range(ranked.shape.n_heads)]
    return pd.DataFrame(rows, columns=["layer", "x", "score"]), [*heads, "attn", "MLP"]


def tokens_of(
    prompts: Sequence[Mapping[str, Any]] | None, example: int = 0
) -> list[str]:
    """One prompt's tokens, where they are known."""
    if not prompts or example >= len(prompts):
        return []
    return list(prompts[example]["clean_token_texts"] or [])
