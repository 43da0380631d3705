"""Which tokens a component has to be computed at, for one circuit.

Before the first token at which the ablated prompt differs from the clean one nothing
moves. From there on, a component's value matters at every token only where a kept path
leads from it to a key or a value, which later tokens read; else it matters only at the
token that is unembedded. Both are exact, and save most of a sparse circuit's work.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """Some tokens of every row: all from `first` on, or, with `last` int64 `[example]`,
    that one. Rows are the examples, copy by copy."""

    first: int = 0
    last: Tensor | None = None

    def take(self, value: Tensor) -> Tensor:
        """These tokens of `[row, pos, …]`; `pos` is 1 where it is one a row."""
        if self.last is None:
            return value[:, self.first :]
        return value[self._rows(value), self._ends(value)][:, None]

    def put(
        self, value: Tensor, into: Tensor, columns: list[int] | None = None
    ) -> None:
        """Write what `take` gives into `[row, pos, column, …]`, in place."""
        where: tuple = (slice(None), slice(self.first, None))
        if self.last is None:
            into[where if columns is None else (*where, columns)] = value
        elif columns is None:
            into[self._rows(into), self._ends(into)] = value[:, 0]
        else:
            rows, ends = self._rows(into)[:, None], self._ends(into)[:, None]
            into[rows, ends, columns] = value[:, 0]

    def _rows(self, value: Tensor) -> Tensor:
        return torch.arange(len(value), device=value.device)

    def _ends(self, value: Tensor) -> Tensor:
        assert self.last is not None
        return self.last.repeat(len(value) // len(self.last))


@dataclass(frozen=True)
class Windows:
    """`every` is where anything moves; `end` what the logits read of it, and `tail`
    takes that from a tensor that `every` was taken from."""

    every: Window
    end: Window
    tail: Window

    @property
    def differ(self) -> bool:
        """Whether the logits are read at one token only."""
        return self.end is not self.every

    def of(self, everywhere: bool) -> Window:
        """The window of what matters everywhere, or at the end only."""
        return self.every if everywhere else self.end

    def at_end(self, value: Tensor) -> Tensor:
        """What `end` takes, of `[sender, row, pos, …]` that `every` was taken from."""
        return self.tail.take(value.flatten(0, 1)).unflatten(0, value.shape[:2])


def windows(first: int, positions: Tensor | None) -> Windows:
    """The windows of a pass that unembeds `positions` (int64 `[example]`; None: all),
    where nothing moves before token `first`."""
    if positions is None:
        every = Window(first)
        return Windows(every, every, Window())
    first = min(first, int(positions.min()))
    return Windows(
        Window(first), Window(last=positions), Window(last=positions - first)
    )
