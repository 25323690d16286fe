"""What the adapters of timm's families share: naming layer types in a description, and checking parts."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from timm import layers as timm_layers
from torch import nn

from aphq.errors import ModelError
from aphq.models.architecture import Mlp, NormPair, Reader

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


def first_layers(mlp: nn.Module, name: str) -> tuple[str, ...]:
    """The layers that read an MLP's input: one, or two where the gate has its own."""
    parts = ("fc1_g", "fc1_x") if isinstance(mlp, timm_layers.SwiGLU) else ("fc1",)
    return tuple(f"{name}.{part}" for part in parts)


def block_norms(model: nn.Module, block: str, may_shift: bool = True) -> tuple[NormPair, NormPair]:
    """Of a block that normalises first: norm1 to queries, keys and values, norm2 to the MLP."""
    attention, mlp = model.get_submodule(f"{block}.attn"), model.get_submodule(f"{block}.mlp")
    # keys first: in attention by the class token alone they see more than the queries do
    separate = [p for p in ("k_proj", "q_proj", "v_proj", "k", "q", "v") if getattr(attention, p, None) is not None]
    gate = ["gate"] if getattr(attention, "gate", None) is not None else []
    whole = ["qkv"] if getattr(attention, "qkv", None) is not None else separate
    layers = [f"{block}.attn.{part}" for part in whole + gate]
    first, *rest = first_layers(mlp, f"{block}.mlp")
    return (
        NormPair(f"{block}.norm1", layers[0], may_shift, tuple(layers[1:])),
        NormPair(f"{block}.norm2", first, others=tuple(rest)),
    )


def has_parameter(model: nn.Module, name: str) -> bool:
    """Whether there is one of this name; the module that would hold it may be an Identity, its value None."""
    owner, _, last = name.rpartition(".")
    return isinstance(getattr(model.get_submodule(owner), last, None), nn.Parameter)


def readers_of(pairs: Iterable[NormPair]) -> tuple[Reader, ...]:
    return tuple(Reader(pair.norm, pair.linears) for pair in pairs)


def block_writers(block: str) -> tuple[str, str]:
    """The layers of a transformer block that add to the residual stream."""
    return f"{block}.attn.proj", f"{block}.mlp.fc2"


def describe_frame(model: Any) -> dict[str, Any]:
    """The arguments that all of timm's families have: the image and its patches, classes, width."""
    embed = model.patch_embed
    return {
        "img_size": list(embed.img_size),
        "patch_size": embed.patch_size[0] if len(set(embed.patch_size)) == 1 else list(embed.patch_size),
        "in_chans": embed.proj.weight.shape[1],
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
    }


def arguments_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """A description as timm's constructors take it: tuples instead of lists, the norm as a class."""
    arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
    arguments["norm_layer"] = norm_factory(arguments.pop("norm"))
    return arguments


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


MLPS: dict[str, Any] = {
    "mlp": timm_layers.Mlp,
    "glu": timm_layers.GluMlp,
    "glu, gate first": partial(timm_layers.GluMlp, gate_last=False),
    "swiglu": timm_layers.SwiGLU,
}


def describe_mlp(module: Any, name: str) -> str:
    require_type(module, name, timm_layers.Mlp, timm_layers.GluMlp, timm_layers.SwiGLU)
    if type(module) is timm_layers.GluMlp:
        return "glu" if module.gate_last else "glu, gate first"
    return "swiglu" if type(module) is timm_layers.SwiGLU else "mlp"


def mlp_factory(key: str) -> Any:
    return _allowed(MLPS, key)


def hidden_width(mlp: Any) -> int:
    """Of an MLP, as its constructor takes it."""
    return int((mlp.fc1_g if isinstance(mlp, timm_layers.SwiGLU) else mlp.fc1).weight.shape[0])


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
