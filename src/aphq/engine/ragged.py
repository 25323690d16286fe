"""Cached activations of images that differ in size: one allocation per image, in whichever tier has room.

A row is a tensor (`RaggedRows`, read as tokens by `TokenRows`) or the state of an image, named tensors (`StateRows`).
What a step only passes on is not copied: the rows before and after it share it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from aphq.engine.store import Activations, Rows, Store
from aphq.models.architecture import State


class RaggedRows:
    """A tensor per image."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.items: list[Activations] = []

    def __len__(self) -> int:
        return len(self.items)

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)

    def append(self, x: Tensor) -> None:
        item = self.store.allocate((1, *x.shape))
        item.data[0].copy_(x)
        self.items.append(item)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        found = [item[slice(0, 1)][0] for item in (self.items[i] for i in numbers(index, len(self)))]
        return found[0] if len(found) == 1 else torch.cat(found)


@dataclass(frozen=True)
class TokenRows:
    """Maps of images of any size as the tokens of several one below the other, [tokens, channels]: for layers that
    treat every token alike."""

    maps: Rows  # [1, ..., channels] each

    def __len__(self) -> int:
        return len(self.maps)

    @property
    def nbytes(self) -> int:
        size: int = getattr(self.maps, "nbytes", 0)
        return size

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        return torch.cat([self.maps[slice(i, i + 1)].flatten(0, -2) for i in numbers(index, len(self))])


class StateRows:
    """A state per image."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.fields: dict[str, RaggedRows] = {}
        self.count = 0

    def __len__(self) -> int:
        return self.count

    def append(self, state: State, given: State, source: Rows) -> None:
        """The next row; what it has in common with the row `given` of `source` is shared."""
        for name, x in state.items():
            field = self.fields.setdefault(name, RaggedRows(self.store))
            if x is given.get(name) and isinstance(source, StateRows):
                field.items.append(source.fields[name].items[self.count])
            else:
                field.append(x)
        self.count += 1

    def __getitem__(self, index: slice | Tensor) -> State:
        return {name: field[index] for name, field in self.fields.items()}


def numbers(index: slice | Tensor, count: int) -> list[int]:
    return list(range(count))[index] if isinstance(index, slice) else index.tolist()


@torch.no_grad()
def push_ragged(step: Callable[[Any], Any], source: Rows, store: Store) -> RaggedRows | StateRows:
    """`step` applied to every row, one by one, into the store."""
    tensors, states = RaggedRows(store), StateRows(store)
    for number in range(len(source)):
        given = source[slice(number, number + 1)]
        out = step(given)
        if isinstance(out, Tensor):
            tensors.append(out)
        else:
            states.append(out, given, source)
    return tensors if len(tensors) else states
