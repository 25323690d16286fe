"""What a description may ask for, judged before anything is allocated: its file says how much there can be.

The files are somebody else's. A forged size would otherwise take all memory, or a forged depth all day, before the
tensors are found not to fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook

from aphq.errors import ModelError

MODULES_PER_TENSOR = 20  # a transformer block has about as many modules as tensors
DERIVED_BYTES = 256 * 2**20  # of what is computed from the description (masks of windows, indices), or ...
DERIVED_RATIO = 4  # ... so many times what the file holds


def check_depth(arguments: Mapping[str, Any], count: int) -> None:
    """A block without a tensor of its own there is not; even a list of a billion zeros would take 8 GB."""
    for key, value in arguments.items():
        if isinstance(value, Mapping):
            check_depth(value, count)
        elif "depth" in key or "layers" in key:
            depths = value if isinstance(value, (list, tuple)) else [value]
            numbers = [depth for depth in depths if isinstance(depth, (int, float))]
            if len(depths) > count or not sum(numbers) <= count:
                raise ModelError(f"the description asks for more blocks than there are tensors ({key})")


@contextmanager
def limited_modules(count: int) -> Iterator[None]:
    """Inside the block, building more modules than `count` tensors can belong to is refused."""
    left = MODULES_PER_TENSOR * count + 1000

    def tick(module: nn.Module, name: str, child: nn.Module | None) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise ModelError(f"the description asks for more modules than {count} tensors can belong to")

    hook = register_module_module_registration_hook(tick)
    try:
        yield
    finally:
        hook.remove()


def check_derived(layout: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """`layout` is the model without memory: what it holds beside its tensors must be in proportion to them."""
    stored = set(layout.state_dict())
    derived = sum(buffer.nbytes for name, buffer in layout.named_buffers() if name not in stored)
    allowed = max(DERIVED_BYTES, DERIVED_RATIO * sum(tensor.nbytes for tensor in tensors.values()))
    if derived > allowed:
        raise ModelError(
            f"the description asks for {derived / 1e9:.1f} GB of masks and indices beside its tensors: "
            "a size in it is not plausible"
        )


def check_dtypes(layout: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Loading would convert silently: half of the bits of a number can still be a number."""
    for name, wanted in layout.state_dict().items():
        if name in state and state[name].dtype != wanted.dtype:
            raise ModelError(f"{name} is stored as {state[name].dtype} instead of {wanted.dtype}")


def check_finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise ModelError(f"{name} holds NaN or infinite numbers: the file is damaged")


def check_input(model: nn.Module, preprocessing: Any) -> None:
    """A model of one size, and images of another: it would fail at the first image."""
    patches = getattr(model, "patch_embed", None)
    size = getattr(patches, "img_size", None)
    wanted = getattr(preprocessing, "size", None)
    if size is not None and wanted is not None and getattr(patches, "strict_img_size", False):
        own = (size, size) if isinstance(size, int) else tuple(size)
        if own != tuple(wanted):
            raise ModelError(f"the model takes images of {own}, its preprocessing makes {tuple(wanted)}")
