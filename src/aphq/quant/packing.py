"""Integers at their true width: 3-bit codes take 3 bits, as one little-endian stream of bits per tensor."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from aphq.errors import ArtifactError


def packed_size(count: int, bits: int) -> int:
    """Bytes that `count` codes of `bits` bits take."""
    return (count * bits + 7) // 8


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes of any shape, each below 2^bits, to a flat uint8 tensor of `packed_size` bytes."""
    flat = codes.to(torch.uint8).cpu().contiguous().reshape(-1).numpy()
    stream = np.unpackbits(flat[:, None], axis=1, bitorder="little", count=bits)  # [codes, bits], low bit first
    return torch.from_numpy(np.packbits(stream.reshape(-1), bitorder="little"))


def unpack(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Inverse of `pack`; refuses a stream whose length does not fit the shape."""
    count = int(np.prod(shape, dtype=np.int64))
    if packed.dtype != torch.uint8 or packed.ndim != 1 or packed.numel() != packed_size(count, bits):
        raise ArtifactError(
            f"{count} codes of {bits} bits take {packed_size(count, bits)} bytes, "
            f"found {tuple(packed.shape)} of {packed.dtype}: the file is damaged"
        )
    stream = np.unpackbits(packed.numpy(), bitorder="little", count=count * bits).reshape(count, bits)
    return torch.from_numpy(np.packbits(stream, axis=1, bitorder="little")[:, 0]).reshape(shape)
