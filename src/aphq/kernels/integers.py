"""Whether the kernels on signed bytes work on a device: `byte_codes`, `byte_linear`, `byte_attention`."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from aphq.kernels import byte_attention, byte_codes, byte_linear, passes

TWO_PASSES = byte_attention.BLOCK._replace(most_keys=0)


@functools.cache
def right(device: torch.device) -> bool:
    """Whether they can be compiled for a device, and compute what they should there."""

    @torch.inference_mode()
    def check() -> None:
        _check_linear(device)
        _check_attention(device)

    return passes(check, "integer")


def _bytes(*shape: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(0)).to(torch.int8)


def _check_linear(device: torch.device) -> None:
    """All tiles; floats and bytes out of them."""
    x, steps = _bytes(40, 128), torch.linspace(0.5, 2, 40)
    sums = (x.int() @ x.int().T).float()
    x, ones, none = x.to(device), torch.ones(40, device=device), torch.empty(0, device=device).int()
    rows = byte_codes.codes(x.float(), 1.0, -128, 127, 0)
    found = byte_linear.linear(rows, x, ones, 0 * ones, (0 * ones).int(), none, torch.float32)
    assert torch.equal(found.cpu(), sums), "products of bytes are wrong"
    bounds = torch.tensor([[-10.0], [100.0], [5.0]]).expand(3, 40)
    emits = torch.stack([steps, *bounds, 1 / steps]).to(device)
    wanted = ((F.gelu(sums * 1e-4) / steps).round().clamp(-10, 100) - 5).to(torch.int8)
    numbers = (1e-4 * ones, 0 * ones, (0 * ones).int(), none)
    for tile in (byte_linear.LARGE, byte_linear.LARGE_GELU):
        found = byte_linear.linear(x, x, *numbers, torch.float32, "gelu", emits, tile=tile)
        assert (found.cpu() != wanted).float().mean() < 0.01, "bytes of a layer are wrong"  # some lie on an edge


def _check_attention(device: torch.device) -> None:
    """All keys at once and in two passes. Scores are alike, so that the softmax is known."""
    x = _bytes(2, 1, 40, 32)
    affine = torch.tensor([[0.01], [-128.0], [127.0], [0.0], [100.0]])
    softmax = torch.tensor([[0.003], [0.0], [255.0], [128.0], [1 / 0.003]])  # 1 / 40 is far from the edge of a code
    wanted = torch.full((40, 40), round(1 / 40 / 0.003) * 0.003) @ (x.float() / 100)
    given = (0.0, None, torch.stack([affine, affine, softmax, affine]).to(device))
    values = (x.float() / 100).to(device)  # on their grid
    found = byte_attention.attention(values, values, values, *given, torch.float32)
    torch.testing.assert_close(found.cpu(), wanted)
    for block in (byte_attention.BLOCK, TWO_PASSES):  # exponentials of 1, cut off at 255 * 0.003
        found = byte_attention.attention(values, values, values, *given, torch.float32, relative=True, block=block)
        torch.testing.assert_close(found.cpu(), torch.full((40, 40), 255 * 0.003 / 40) @ (x.float() / 100))
    x = x.to(device)
    found = byte_attention.attention(x, x, x, *given, torch.float32, emits=affine[:, 0].to(device), block=TWO_PASSES)
    assert ((found.cpu() - wanted / 0.01).abs() < 0.51).all(), "bytes of an attention are wrong"
