"""Checkpoints of other people's trainers: .safetensors and pickles of tensors, spoilt."""

import io
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from aphq.models.loading import read_checkpoint

from .cases import cases
from .isolation import outcome_of
from .mutation import Spoiler


def checkpoint(suffix: str) -> bytes:
    state = {"head.weight": torch.zeros(3, 5), "head.bias": torch.ones(3, dtype=torch.float16)}
    if suffix == ".safetensors":
        return save(state)
    buffer = io.BytesIO()
    torch.save({"model": state, "epoch": 3}, buffer, _use_new_zipfile_serialization=suffix == ".pt")
    return buffer.getvalue()


@cases(0.1)
@given(data=st.data())
def test_weights(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    spoiler = Spoiler(data)
    suffix = spoiler.one_of([".safetensors", ".pt", ".pth"])
    content = checkpoint(suffix)
    spoilt = spoiler.safetensors(content) if suffix == ".safetensors" else spoiler.bytes(content)
    path: Path = tmp_path_factory.getbasetemp() / f"weights{suffix}"
    path.write_bytes(spoilt)
    outcome_of(lambda: read_checkpoint(path), pickles=True)
