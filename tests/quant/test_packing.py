import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from aphq.errors import ArtifactError
from aphq.quant.packing import pack, packed_size, unpack

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)


@given(st.integers(2, 8), shapes, st.integers(0, 10**6))
def test_unpacking_what_was_packed_gives_it_back(bits: int, shape: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.dtype == torch.uint8
    assert packed.shape == (packed_size(math.prod(shape), bits),)
    again = unpack(packed, bits, shape)
    assert again.shape == codes.shape
    assert torch.equal(again, codes)


@given(st.integers(2, 8), st.integers(0, 1000))
def test_codes_take_their_true_width(bits: int, count: int) -> None:
    assert packed_size(count, bits) == math.ceil(count * bits / 8)


def test_the_stream_is_little_endian_without_gaps() -> None:
    # 3-bit codes 1, 2, 3: bits 001 010 011, low bit first -> 100 010 110 -> bytes 0b11010001, 0b0
    assert pack(torch.tensor([1, 2, 3]), 3).tolist() == [0b11010001, 0]
    assert pack(torch.tensor([[0x1, 0x2], [0x3, 0xF]]), 4).tolist() == [0x21, 0xF3]


def test_codes_that_are_whole_floats_or_not_contiguous_pack_alike() -> None:
    codes = torch.arange(16).reshape(4, 4)
    assert torch.equal(pack(codes.float(), 4), pack(codes, 4))
    assert torch.equal(unpack(pack(codes.T, 4), 4, (4, 4)), codes.T.byte())


@pytest.mark.parametrize(
    "packed",
    [
        torch.zeros(4, dtype=torch.uint8),
        torch.zeros(6, dtype=torch.uint8),
        torch.zeros(5, dtype=torch.int8),
        torch.zeros(1, 5, dtype=torch.uint8),
    ],
)
def test_a_stream_that_does_not_fit_the_shape_is_refused(packed: torch.Tensor) -> None:
    with pytest.raises(ArtifactError, match=r"10 codes of 4 bits take 5 bytes.*damaged"):
        unpack(packed, 4, (2, 5))
