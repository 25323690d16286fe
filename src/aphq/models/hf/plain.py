"""Transformers of equal blocks that normalise first: ViT, DeiT, DINOv2, BEiT, CLIP, SigLIP.

Embeddings with everything added to them are one unit, each block is one, the pooling and the head are the last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from aphq.models.architecture import Mlp, NormPair, Reader, Step, Stream, Unit, module_step, unchanged
from aphq.models.hf.attention import LAYERS, OUTPUTS
from aphq.models.hf.base import HfArchitecture, require_parts
from aphq.models.timm_parts import has_parameter, readers_of

TOKENS = ("cls_token", "distillation_token", "register_tokens", "position_embeddings")


@dataclass(frozen=True)
class Layout:
    """Where a block keeps its parts."""

    blocks: str  # the list, below the bare model
    norms: tuple[str, str] = ("layernorm_before", "layernorm_after")
    attention: str = "attention"
    scales: tuple[str, str] | None = None  # parameters of a LayerScale


class HfPlain(HfArchitecture):
    layout: ClassVar[Layout]

    def check(self, model: Any) -> None:
        prefix, _ = self.root(model)
        for name, block in self.blocks(model):
            require_parts(block, name, *self.layout.norms, self.layout.attention, "mlp")
            require_parts(block.get_submodule(self.layout.attention), f"{name}.{self.layout.attention}", *LAYERS)
        require_parts(model.get_submodule(f"{prefix}embeddings"), f"{prefix}embeddings")

    def blocks(self, model: Any) -> list[tuple[str, Any]]:
        prefix, _ = self.root(model)
        name = f"{prefix}{self.layout.blocks}"
        return [(f"{name}.{i}", block) for i, block in enumerate(model.get_submodule(name))]

    def units(self, model: Any) -> tuple[Unit, ...]:
        prefix, _ = self.root(model)
        names = [name for name, _ in self.blocks(model)]
        embed = f"{prefix}embeddings"
        units = [Unit(embed, "patch_embed", module_step(embed), self.before_blocks, (embed,))]
        for name, block in self.blocks(model):
            bridge = self.after_blocks if name == names[-1] else unchanged
            parts = (self.mlp(name, block), self.norms(name, block))
            units.append(Unit(name, "block", self.step(name), bridge, (name,), *parts))
        units.append(self.head(model))
        return tuple(units)

    # -- what families change ----------------------------------------------------------------------------------------

    def before_blocks(self, model: Any, x: Tensor) -> Tensor:
        """From the embeddings to the first block."""
        return x

    def step(self, block: str) -> Step:
        """How a block runs."""

        def run(model: nn.Module, x: Tensor) -> Tensor:
            return tensor_of(model.get_submodule(block)(x, attention_mask=None))

        return run

    def after_blocks(self, model: Any, x: Tensor) -> Tensor:
        """From the last block to the head unit."""
        raise NotImplementedError

    def head(self, model: Any) -> Unit:
        """The last unit; without a classifier it has nothing to quantize and stands for the pooled features."""
        names = self.heads(model)
        prefix, _ = self.root(model)
        if not names:
            return Unit(f"{prefix}layernorm", "head", unchanged, unchanged, ())
        return Unit(names[0], "head", module_step(names[0]), unchanged, names)

    def last_reader(self, model: Any) -> Reader | None:
        """The norm before the head, if the head alone reads it."""
        return None

    # -- parts of a block --------------------------------------------------------------------------------------------

    def mlp(self, name: str, block: Any) -> Mlp | None:
        """None for the gated one."""
        inner = f"{name}.mlp"
        return (
            Mlp(inner, f"{inner}.fc1", f"{inner}.activation_fn", f"{inner}.fc2") if hasattr(block.mlp, "fc1") else None
        )

    def norms(self, name: str, block: Any) -> tuple[NormPair, NormPair]:
        first, second = (f"{name}.{norm}" for norm in self.layout.norms)
        q, *others = (f"{name}.{self.layout.attention}.{layer}" for layer in LAYERS)
        into = ("fc1",) if hasattr(block.mlp, "fc1") else ("gate_proj", "up_proj")
        fc1, *gate = (f"{name}.mlp.{layer}" for layer in into)
        return NormPair(first, q, others=tuple(others)), NormPair(second, fc1, others=tuple(gate))

    def writers(self, name: str, block: Any) -> tuple[str, str]:
        attention = block.get_submodule(self.layout.attention)
        output = next(layer for layer in OUTPUTS if hasattr(attention, layer))
        return (
            f"{name}.{self.layout.attention}.{output}",
            f"{name}.mlp.{'fc2' if hasattr(block.mlp, 'fc2') else 'down_proj'}",
        )

    def streams(self, model: Any) -> tuple[Stream, ...]:
        last = self.last_reader(model)
        if last is None:
            return ()
        prefix, _ = self.root(model)
        embeddings = model.get_submodule(f"{prefix}embeddings")
        writers, scales = [f"{prefix}embeddings.patch_embeddings.projection"], []
        readers: list[Reader] = []
        for name, block in self.blocks(model):
            own = self.writers(name, block)
            writers += own
            readers += readers_of(self.norms(name, block))
            for scale, writer in zip(self.layout.scales or (), own, strict=bool(self.layout.scales)):
                if has_parameter(model, f"{name}.{scale}"):
                    scales.append((f"{name}.{scale}", writer))
        constants = [f"{prefix}embeddings.{n}" for n in TOKENS if getattr(embeddings, n, None) is not None]
        return (Stream(tuple(writers), (*readers, last), tuple(constants), tuple(scales)),)


def tensor_of(output: Any) -> Tensor:
    """A block's tokens, whether it gives them alone or with its attention."""
    tokens: Tensor = output[0] if isinstance(output, tuple) else output
    return tokens
