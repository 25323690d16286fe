"""The widest elementwise passes of a step on a CPU, each compiled into one loop over memory by torch's own compiler.

What a kernel is on a GPU: a fake-quantized tensor of millions of elements is otherwise read and written a dozen times.
Needs a C++ compiler; small tensors and machines without one take the plain twins, `quant.affine._FakeQuantize` and
`stages.mlp_reconstruction.relu_and_clamped`, whose elements these equal bit for bit.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from aphq import kernels
from aphq.quant.drop import Drop, transposed

LARGE = 2**20  # elements from which on compiling, some fifteen seconds once on a machine, is soon made good
LAYOUTS = 64  # a program is compiled anew for tensors that lie otherwise, at most so often


def usable(x: Tensor) -> bool:
    """Whether the compiled passes can take this tensor."""
    large = x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() >= LARGE
    return large and kernels.switched_on and not kernels.interpreted and compiler_works()


@functools.cache
def compiler_works() -> bool:
    def compile_one() -> None:
        logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # says that there is no GPU
        _relu_and_clamped(torch.zeros(2), torch.ones(1))

    return kernels.passes(compile_one, "compiled CPU")


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """One program for tensors of any size, made at its first call."""

    @functools.cache
    def program() -> Callable[..., Any]:
        from torch import _dynamo as dynamo  # takes seconds to import
        from torch._inductor import config as inductor

        dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, LAYOUTS)
        inductor.compile_threads = 1  # no pool of processes for a handful of programs
        return torch.compile(function, dynamic=True)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        return program()(*args)

    return call


@_compiled
def _quantized(
    x: Tensor, scale: Tensor, low: Tensor, high: Tensor, noise: Tensor | None, threshold: Tensor, relu: bool
) -> Tensor:
    x = x.relu() if relu else x
    y = (x / scale).round().clamp(low, high) * scale
    return (y if noise is None else torch.where(noise.float() < threshold, y, x)).contiguous()  # as products want it


@_compiled
def _quantized_backward(
    grad: Tensor, x: Tensor, scale: Tensor, low: Tensor, high: Tensor, noise: Tensor | None, threshold: Tensor,
    relu: bool, over: tuple[int, ...],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradients for x and, summed `over` dimensions, for the scale."""
    v = (x.relu() if relu else x) / scale
    rounded = v.round()
    code = rounded.clamp(low, high)
    inside = code == rounded
    slope = (code - torch.where(inside, v, 0.0)) * grad
    passes = inside
    if noise is not None:
        keep = noise.float() < threshold
        slope, passes = torch.where(keep, slope, 0.0), inside | ~keep
    if relu:
        passes = passes & (x > 0)
    return torch.where(passes, grad, 0.0), slope.sum(over)


@_compiled
def _relu_and_clamped(x: Tensor, bound: Tensor) -> Tensor:
    hidden = x.relu()
    return torch.stack([hidden, torch.minimum(hidden, bound)])


@_compiled
def _relu_and_clamped_backward(grad: Tensor, x: Tensor, bound: Tensor) -> Tensor:
    return torch.where(x > 0, grad[0] + torch.where(x <= bound, grad[1], 0.0), 0.0)


def fake_quantize(
    x: Tensor, scale: Tensor, zero_point: Tensor, top: int, drop: Drop | None, relu: bool = False
) -> Tensor:
    """Q(x), or Q(relu(x)), with the elements `drop` says left in float; gradients for x and scale."""
    if transposed(x):  # and stays so
        return fake_quantize(x.transpose(-1, -2), scale, zero_point, top, drop, relu).transpose(-1, -2)
    noise = None if drop is None else drop.noise(x)
    threshold = torch.tensor([256 if drop is None else drop.threshold], dtype=torch.float32)
    values = x
    if scale.numel() == 1 and x.is_contiguous():  # one long row, whatever its shape
        values, scale, zero_point = x.reshape(-1), scale.reshape(1), zero_point.reshape(1)
        noise = None if noise is None else noise.reshape(-1)
    result: Tensor = _FakeQuantize.apply(values, scale, zero_point, top, noise, threshold, relu)
    return result.view(x.shape)


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, top: int, noise: Tensor | None, threshold: Tensor,
        relu: bool,
    ) -> Tensor:  # fmt: skip
        low, high = -zero_point, top - zero_point
        ctx.save_for_backward(x, scale, low, high, noise, threshold)
        ctx.relu = relu
        y: Tensor = _quantized(x, scale, low, high, noise, threshold, relu)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors[:2]
        over = tuple(i for i, size in enumerate((1,) * (x.ndim - scale.ndim) + tuple(scale.shape)) if size == 1)
        grad_x, grad_scale = _quantized_backward(grads[0], *ctx.saved_tensors, ctx.relu, over)
        return grad_x, grad_scale.reshape(scale.shape), None, None, None, None, None


def relu_and_clamped(x: Tensor, bound: float) -> Tensor:
    """[2, *x.shape]"""
    result: Tensor = _ReluAndClamped.apply(x.reshape(-1), torch.tensor([bound])).view(2, *x.shape)
    return result


class _ReluAndClamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bound: Tensor) -> Tensor:
        ctx.save_for_backward(x, bound)
        y: Tensor = _relu_and_clamped(x, bound)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _relu_and_clamped_backward(grads[0], *ctx.saved_tensors), None
