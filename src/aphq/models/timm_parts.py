"""What the adapters of timm's families share: naming layer types in a description, and checking parts."""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import Any

from timm import layers as timm_layers
from torch import nn

from aphq.errors import ModelError
from aphq.models.architecture import Mlp, Reader

# The only classes an artifact may name; nothing else is looked up from a file.
NORMS: dict[str, type[nn.Module]] = {
    "LayerNorm": timm_layers.LayerNorm,
    "torch.LayerNorm": nn.LayerNorm,
    "RmsNorm": timm_layers.RmsNorm,
}
ACTIVATIONS: dict[str, Any] = {
    "gelu": nn.GELU,
    "gelu_tanh": partial(nn.GELU, approximate="tanh"),
    "timm_gelu_tanh": timm_layers.GELUTanh,
    "quick_gelu": timm_layers.QuickGELU,
    "relu": nn.ReLU,
    "silu": nn.SiLU,
}


def require_type(module: nn.Module, name: str, *wanted: type[nn.Module]) -> None:
    """Exactly one of the classes: a subclass may compute something else."""
    if type(module) not in wanted:
        names = " or ".join(cls.__name__ for cls in wanted)
        raise ModelError(f"module {name!r} is a {type(module).__name__}; supported there: {names}")


def timm_mlp(module: nn.Module, name: str) -> Mlp | None:
    """The description of timm's `Mlp`; None for one with a gate, which has another shape."""
    if type(module) is not timm_layers.Mlp:
        return None
    norm = None if isinstance(module.norm, nn.Identity) else f"{name}.norm"
    return Mlp(name, f"{name}.fc1", f"{name}.act", f"{name}.fc2", norm)


def block_writers(block: str) -> tuple[str, str]:
    """The layers of a transformer block that add to the residual stream."""
    return f"{block}.attn.proj", f"{block}.mlp.fc2"


def block_readers(block: str) -> tuple[Reader, Reader]:
    """What reads the residual stream in a transformer block."""
    return Reader(f"{block}.norm1", (f"{block}.attn.qkv",)), Reader(f"{block}.norm2", (f"{block}.mlp.fc1",))


def describe_norm(module: nn.Module, name: str) -> dict[str, Any]:
    for key, cls in NORMS.items():
        if type(module) is cls:
            return {"type": key, "eps": float(module.eps)}  # type: ignore[arg-type]
    raise ModelError(f"module {name!r} is a {type(module).__name__}; supported norms: {', '.join(NORMS)}")


def norm_factory(description: dict[str, Any]) -> Any:
    return partial(_allowed(NORMS, description["type"]), eps=float(description["eps"]))


def describe_activation(module: nn.Module, name: str) -> str:
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    for key, cls in ACTIVATIONS.items():
        if type(module) is cls:
            return key
    raise ModelError(f"module {name!r} is a {type(module).__name__}; supported activations: {', '.join(ACTIVATIONS)}")


def activation_factory(key: str) -> Any:
    return _allowed(ACTIVATIONS, key)


def mlp_ratio(hidden: int, width: int) -> float:
    """The ratio from which timm's `int(width * ratio)` gives `hidden` again."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else math.nextafter(ratio, math.inf)


def construct(cls: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    """`cls(**arguments)` without the arguments that equal its defaults (other versions may lack them)."""
    defaults = {k: p.default for k, p in inspect.signature(cls.__init__).parameters.items()}
    wanted = {k: v for k, v in arguments.items() if k not in defaults or defaults[k] != v}
    try:
        return cls(**wanted)
    except (TypeError, ValueError, AssertionError, KeyError, ZeroDivisionError, RuntimeError) as problem:
        raise ModelError(f"cannot build a {cls.__name__} from its description: {problem}") from None


def _allowed(table: dict[str, Any], key: Any) -> Any:
    if not isinstance(key, str) or key not in table:
        raise ModelError(f"{key!r} is not among the layer types a model file may name: {', '.join(table)}")
    return table[key]
