from pathlib import Path

import pytest
import torch
from torch import Tensor

from aphq.engine.ragged import RaggedRows, StateRows, TokenRows, push_ragged
from aphq.engine.store import Store
from aphq.models.architecture import State

CPU = torch.device("cpu")


def store(host_bytes: int | None = None, folder: Path | None = None) -> Store:
    return Store(CPU, gpu_bytes=None, host_bytes=host_bytes, folder=folder)


class Source:
    """Three images of different widths."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: slice | Tensor) -> State:
        (number,) = range(3)[index] if isinstance(index, slice) else index.tolist()
        return {"x": torch.full((1, 2, number + 2), float(number)), "boxes": torch.arange(4.0 * number).view(-1, 4)}


def test_rows_keep_their_sizes() -> None:
    rows = push_ragged(lambda state: {**state, "x": state["x"] + 1}, Source(), store())
    assert isinstance(rows, StateRows)
    assert len(rows) == 3
    for number in range(3):
        for index in (slice(number, number + 1), torch.tensor([number])):
            state = rows[index]
            assert torch.equal(state["x"], torch.full((1, 2, number + 2), number + 1.0))
            assert state["boxes"].shape == (number, 4)


def test_a_step_may_give_tensors_and_equal_rows_form_a_batch() -> None:
    rows = push_ragged(lambda state: state["x"], Source(), store())
    assert isinstance(rows, RaggedRows)
    assert rows[torch.tensor([2, 2])].shape == (2, 2, 4)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        rows[slice(0, 2)]


def test_maps_of_different_sizes_are_read_as_tokens() -> None:
    rows = TokenRows(push_ragged(lambda state: state["x"].mT, Source(), store()))  # [1, width, 2]
    assert len(rows) == 3
    assert rows.nbytes == 4 * 2 * (2 + 3 + 4)
    assert torch.equal(rows[torch.tensor([2, 0])], torch.tensor([2.0] * 4 + [0.0] * 2)[:, None].expand(6, 2))
    assert rows[slice(0, 3)].shape == (9, 2)


def test_what_is_passed_on_is_shared_and_given_back() -> None:
    cache = store()
    first = push_ragged(lambda state: state, Source(), cache)
    used = cache.used["host"]
    second = push_ragged(lambda state: {**state, "y": state["x"] * 2}, first, cache)
    assert cache.used["host"] - used == used - 4 * 4 * 3, "only `y` is new; the boxes hold 4 numbers per image"
    del first
    assert torch.equal(second[slice(1, 2)]["x"], torch.full((1, 2, 3), 1.0))
    del second
    assert cache.used["host"] == 0


def test_rows_that_do_not_fit_go_to_disk(tmp_path: Path) -> None:
    cache = store(host_bytes=4 * 2 * 2, folder=tmp_path)
    rows = push_ragged(lambda state: state["x"], Source(), cache)
    assert [item.tier for item in rows.items] == ["host", "disk", "disk"]  # type: ignore[union-attr]
    assert torch.equal(rows[slice(2, 3)], torch.full((1, 2, 4), 2.0))
