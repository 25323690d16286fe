"""Looking into a forward pass: read what a module gets, or replace what it gives, inside a `with` block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def watch_inputs(modules: Mapping[str, nn.Module], see: Callable[[str, tuple[Tensor, ...]], None]) -> Iterator[None]:
    """`see(name, inputs)` before each forward of the modules."""
    with ExitStack() as stack:
        for name, module in modules.items():

            def hook(_: nn.Module, inputs: tuple[Any, ...], name: str = name) -> None:
                see(name, tuple(x for x in inputs if isinstance(x, Tensor)))

            stack.callback(module.register_forward_pre_hook(hook).remove)
        yield


@contextmanager
def change_outputs(modules: Mapping[str, nn.Module], change: Callable[[str, Tensor], Tensor]) -> Iterator[None]:
    """Each module's output is replaced by `change(name, output)`; of a tuple, its first element."""
    with ExitStack() as stack:
        for name, module in modules.items():

            def hook(_: nn.Module, inputs: tuple[Any, ...], output: Any, name: str = name) -> Any:
                if isinstance(output, tuple):
                    return (change(name, output[0]), *output[1:])
                return change(name, output)

            stack.callback(module.register_forward_hook(hook).remove)
        yield
