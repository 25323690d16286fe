"""What the rest of the project knows of a model: an ordered chain of units.

A model is images -> unit -> bridge -> unit -> ... -> logits. Units are reconstructed one by one; a bridge is the float
glue between two of them (position embedding, final norm, pooling). An adapter, one small file per family, cuts its
family into units and is found by the model's class, never by its name.

What flows along the chain is a tensor with a row per image. Where a model branches (a detector's pyramid reads four
stages) it is a state instead: named tensors of one image, of which a unit makes some and passes on the others.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from aphq import extras
from aphq.data.preprocessing import Preprocessing
from aphq.errors import ModelError

UnitKind = Literal["patch_embed", "block", "merge", "neck", "head"]
TaskName = Literal["classification", "embedding", "detection"]
State = dict[str, Tensor]
Value = Tensor | State
Step = Callable[[nn.Module, Any], Any]  # (whole model, input) -> output, both a Value


@dataclass(frozen=True)
class NormPair:
    """A LayerNorm whose output feeds one linear layer, or several that take the same, so that a rescaling can move from
    one into the other."""

    norm: str
    linear: str
    may_shift: bool = True  # False where zero padding comes between: it would no longer mean zero
    others: tuple[str, ...] = ()  # further layers that read the norm, or some of its tokens: keys and values, say

    @property
    def linears(self) -> tuple[str, ...]:
        return self.linear, *self.others


@dataclass(frozen=True)
class Mlp:
    """Two linear layers with an activation between them, by name: fc2(norm(act(fc1(x))))."""

    name: str
    fc1: str
    act: str
    fc2: str
    norm: str | None = None


@dataclass(frozen=True)
class Reader:
    """A LayerNorm on a residual stream, and the linear layers that alone read what it gives."""

    norm: str
    linears: tuple[str, ...]
    copies: int = 1  # tokens side by side in one vector, as patch merging lays them


@dataclass(frozen=True)
class Stream:
    """A residual stream whose basis is free: all that writes to it and all that reads from it, by name."""

    writers: tuple[str, ...]  # linear layers and convolutions whose output is added to it
    readers: tuple[Reader, ...]
    constants: tuple[str, ...] = ()  # parameters [..., channels] that are added to it or are part of it
    scales: tuple[tuple[str, str], ...] = ()  # (parameter of a LayerScale, the writer before it)


@dataclass(frozen=True)
class Unit:
    """A part of the model that is reconstructed as a whole; `name` is the module whose output is the unit's."""

    name: str
    kind: UnitKind
    run: Step
    bridge: Step  # from this unit's output to the next unit's input (after the last unit: to the logits)
    modules: tuple[str, ...]  # module paths that hold the unit's parameters
    mlp: Mlp | None = None  # None too where an MLP has another shape, such as a gate
    norms: tuple[NormPair, ...] = ()
    makes: tuple[str, ...] = ()  # the tensors of a state that are the unit's output; none where tensors flow
    channel_dim: int = -1  # of its output


def unit_sites(unit: Unit) -> tuple[str, ...]:
    """The modules whose outputs are reconstructed: the MLP's last layer and the whole."""
    return (unit.name,) if unit.mlp is None else (unit.mlp.fc2, unit.name)


def mlps_of(units: Sequence[Unit]) -> dict[str, Mlp]:
    """The MLPs by their names, which are what files keep."""
    return {unit.mlp.name: unit.mlp for unit in units if unit.mlp is not None}


def unchanged(model: nn.Module, x: Value) -> Value:
    """The bridge between two units that touch."""
    return x


def made(unit: Unit, value: Value) -> Value:
    """The unit's own output: all of a tensor, some tensors of a state."""
    return value if isinstance(value, Tensor) else {name: value[name] for name in unit.makes}


def rows_of(value: Value) -> int:
    """How many images a value belongs to."""
    return len(value) if isinstance(value, Tensor) else 1


def module_step(name: str) -> Step:
    """A unit that is just one module."""

    def run(model: nn.Module, x: Tensor) -> Tensor:
        out: Tensor = model.get_submodule(name)(x)
        return out

    return run


class Architecture(ABC):
    """The adapter of a model family."""

    family: ClassVar[str]  # the name that artifacts carry
    classes: ClassVar[tuple[type[nn.Module], ...]]
    task: ClassVar[TaskName] = "classification"
    refused: ClassVar[dict[type[nn.Module], str]] = {}  # relatives it cannot take, and what it says of them

    def task_of(self, model: nn.Module) -> TaskName:
        """What this very model is for: without a classifier it embeds."""
        return self.task

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        """The images that a classifier or an embedding takes."""
        return Preprocessing.of_model(model)

    def num_classes(self, model: nn.Module) -> int:
        """How many numbers the model says of an image: classes, or channels of its embedding."""
        return int(model.num_classes or model.num_features)  # type: ignore[arg-type]

    @abstractmethod
    def check(self, model: nn.Module) -> None:
        """Raise ModelError, naming the module, if the model has a part this adapter does not know."""

    @abstractmethod
    def units(self, model: nn.Module) -> tuple[Unit, ...]:
        """The chain, in forward order."""

    def streams(self, model: nn.Module) -> tuple[Stream, ...]:
        """The residual streams that may be rotated; none where a family does not say."""
        return ()

    @abstractmethod
    def open_attention(self, model: nn.Module) -> None:
        """Replace, in place, each attention module by one whose two products are modules of their own."""

    @abstractmethod
    def describe(self, model: nn.Module) -> dict[str, Any]:
        """Constructor arguments, as plain values, from which `build` makes an equal empty model."""

    @abstractmethod
    def build(self, description: dict[str, Any]) -> nn.Module:
        """An untrained model of that description; ModelError if it does not make sense."""


_REGISTRY: list[Architecture] = []
_LATER = {"transformers": "aphq.models.hf"}  # adapters of libraries that are optional and slow to import


def _import_families(name: str) -> None:
    """Make the adapters known that a module or a family of this name may need."""
    package = _LATER.get(name.split(".")[0])
    if package is not None:
        extras.require("transformers")
        importlib.import_module(package)


def register(cls: type[Architecture]) -> type[Architecture]:
    """Class decorator: make an adapter known."""
    _REGISTRY.append(cls())
    return cls


def families() -> tuple[Architecture, ...]:
    """The adapters that are known so far."""
    return tuple(_REGISTRY)


def find_architecture(model: nn.Module) -> Architecture | None:
    """The adapter for a model, float or quantized: that of its nearest registered base class, if there is one."""
    for base in type(model).__mro__:
        _import_families(base.__module__)
        for architecture in _REGISTRY:
            if base in architecture.refused:
                raise ModelError(f"cannot quantize a {type(model).__name__}: {architecture.refused[base]}")
            if base in architecture.classes:
                return architecture
    return None


def architecture_of(model: nn.Module) -> Architecture:
    """The adapter for a model, which is checked."""
    found = find_architecture(model)
    if found is not None:
        found.check(model)
        return found
    package = type(model).__module__.split(".")[0]
    known = sorted(f"{cls.__module__.split('.')[0]}'s {cls.__name__}" for a in _REGISTRY for cls in a.classes)
    known = [name for name in known if name.startswith(f"{package}'s ")] or known  # what the user could have had
    name, part = _first_strange_part(model)
    where = f" (no adapter knows its module {name!r} of class {type(part).__name__})" if name else ""
    raise ModelError(
        f"cannot quantize a {type(model).__name__}{where}; supported: {', '.join(known)} and subclasses of them"
    )


def _first_strange_part(model: nn.Module) -> tuple[str, nn.Module]:
    """The innermost of the first parts with parameters that is not one of torch's own layers."""
    name, part = "", model
    while True:
        children = ((n, m) for n, m in part.named_children() if any(True for _ in m.parameters()))
        first = next(children, None)
        if first is None or type(first[1]).__module__.startswith("torch.nn."):
            break
        name, part = f"{name}.{first[0]}".lstrip("."), first[1]
    if name:
        return name, part
    for inner, module in model.named_modules():  # it starts with layers of torch: the first part that multiplies
        own = not type(module).__module__.startswith("torch.nn.")
        if inner and own and any(isinstance(m, (nn.Linear, nn.Conv2d)) for m in module.modules()):
            return inner, module
    return name, part


def architecture_named(family: str) -> Architecture:
    _import_families(str(family))
    for architecture in _REGISTRY:
        if architecture.family == family:
            return architecture
    raise ModelError(f"unknown model family {family!r}; this aphq knows {', '.join(a.family for a in _REGISTRY)}")


def run_units(model: nn.Module, units: Sequence[Unit], x: Any) -> Any:
    """`x` through the units and the bridges after them; all units: images to logits."""
    for unit in units:
        x = unit.bridge(model, unit.run(model, x))
    return x


PREDICTIONS = ("logits", "image_embeds", "pooler_output")  # in a structured output, the most processed first


def predict(model: nn.Module, images: Tensor) -> Tensor:
    """Logits or embeddings [batch, classes], whether the model gives a tensor or, as transformers do, a structure."""
    output = model(images)
    if isinstance(output, Tensor):
        return output
    for name in PREDICTIONS:
        value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    raise ModelError(f"expected logits or embeddings from the model, got a {type(output).__name__} without any")


@torch.no_grad()
def check_units(model: nn.Module, units: Sequence[Unit], images: Tensor) -> None:
    """The chain of units must be the model: a subclass with its own forward, say, is found out here."""
    expected, got = predict(model, images), run_units(model, units, images)
    if expected.ndim != 2:
        kind = f"shape {tuple(expected.shape)}"
        raise ModelError(f"expected logits or embeddings of shape [batch, classes] from the model, got {kind}")
    if not torch.isfinite(expected).all():
        raise ModelError("the float model's output is not finite (NaN or Inf): check its weights")
    if not torch.allclose(expected, got, rtol=1e-3, atol=1e-3 * float(expected.abs().max())):
        raise ModelError(
            f"the forward pass of this {type(model).__name__} is not the chain {units[0].name} ... {units[-1].name}: "
            "a subclass with its own forward needs its own adapter (see CONTRIBUTING.md)"
        )


def replace_all(model: nn.Module, twins: Mapping[type[nn.Module], Callable[[Any], nn.Module]]) -> None:
    """Put a twin in the place of every module of exactly one of the classes."""
    for name, module in list(model.named_modules()):
        if type(module) in twins:
            replace_module(model, name, twins[type(module)](module))


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `name` is."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
