"""timm's SwinTransformer (v1): any window, size and depth. Tokens are laid out as an image, [batch, h, w, channels]."""

from __future__ import annotations

from typing import Any, ClassVar

from timm.layers import ClassifierHead, Mlp, PatchEmbed
from timm.models.swin_transformer import (
    PatchMerging,
    SwinTransformer,
    SwinTransformerBlock,
    SwinTransformerStage,
    WindowAttention,
)
from torch import Tensor, nn

from aphq.models.architecture import (
    Architecture,
    NormPair,
    Reader,
    Stream,
    TaskName,
    Unit,
    module_step,
    register,
    replace_all,
    unchanged,
)
from aphq.models.attention import SwinAttention
from aphq.models.timm_parts import (
    block_norms,
    block_writers,
    construct,
    describe_frame,
    describe_norm,
    mlp_ratio,
    norm_factory,
    readers_of,
    require_type,
    timm_mlp,
)


@register
class TimmSwin(Architecture):
    family = "timm.SwinTransformer"
    classes: ClassVar[tuple[type[nn.Module], ...]] = (SwinTransformer,)
    merging: ClassVar[type[nn.Module]] = PatchMerging
    stage: ClassVar[type[nn.Module]] = SwinTransformerStage
    block: ClassVar[type[nn.Module]] = SwinTransformerBlock
    attentions: ClassVar[tuple[type[nn.Module], ...]] = (WindowAttention, SwinAttention)
    activations: ClassVar[tuple[type[nn.Module], ...]] = (nn.GELU,)  # timm builds no other

    def check(self, model: Any) -> None:
        require_type(model.patch_embed, "patch_embed", PatchEmbed)
        require_type(model.head, "head", ClassifierHead)
        for s, stage in enumerate(model.layers):
            require_type(stage, f"layers.{s}", self.stage)
            require_type(stage.downsample, f"layers.{s}.downsample", self.merging, nn.Identity)
            for b, block in enumerate(stage.blocks):
                name = f"layers.{s}.blocks.{b}"
                require_type(block, name, self.block)
                require_type(block.attn, f"{name}.attn", *self.attentions)
                require_type(block.mlp, f"{name}.mlp", Mlp)
                require_type(block.mlp.act, f"{name}.mlp.act", *self.activations)

    def task_of(self, model: Any) -> TaskName:
        return "embedding" if isinstance(model.head.fc, nn.Identity) else "classification"

    def units(self, model: Any) -> tuple[Unit, ...]:
        units = [Unit("patch_embed", "patch_embed", module_step("patch_embed"), unchanged, ("patch_embed",))]
        height, width = model.patch_embed.grid_size
        for s, stage in enumerate(model.layers):
            if isinstance(stage.downsample, self.merging):
                height, width = -(-height // 2), -(-width // 2)  # an odd side is padded; `input_resolution` says less
                name = f"layers.{s}.downsample"
                norms = self.merge_norms(name)
                units.append(Unit(name, "merge", module_step(name), unchanged, (name,), norms=norms))
            for b, block in enumerate(stage.blocks):
                name = f"layers.{s}.blocks.{b}"
                is_last = stage is model.layers[-1] and block is stage.blocks[-1]
                norms = self.norms(model, name, may_shift=not _pads(block, (height, width)))
                bridge = _final_norm if is_last else unchanged
                mlp = timm_mlp(block.mlp, f"{name}.mlp")
                units.append(Unit(name, "block", module_step(name), bridge, (name,), mlp, norms))
        units.append(Unit("head", "head", module_step("head"), unchanged, ("head",)))
        return tuple(units)

    def norms(self, model: Any, name: str, may_shift: bool) -> tuple[NormPair, ...]:
        return block_norms(model, name, may_shift)

    def merge_norms(self, name: str) -> tuple[NormPair, ...]:
        return (NormPair(f"{name}.norm", f"{name}.reduction"),)

    def streams(self, model: Any) -> tuple[Stream, ...]:
        """One per stage that a patch merging starts; the first stage's comes out of a LayerNorm, which fixes its basis,
        and where windows are filled with zeros after a norm its bias cannot move."""
        if model.global_pool != "avg" or self.task_of(model) == "embedding":
            return ()
        shifts = {pair.norm: pair.may_shift for unit in self.units(model) for pair in unit.norms}
        streams = []
        for s, stage in enumerate(model.layers):
            blocks = [f"layers.{s}.blocks.{b}" for b in range(len(stage.blocks))]
            after = f"layers.{s + 1}.downsample"
            if stage is model.layers[-1]:
                last = Reader("norm", ("head.fc",))
            elif isinstance(model.layers[s + 1].downsample, PatchMerging):
                last = Reader(f"{after}.norm", (f"{after}.reduction",), copies=4)
            else:
                continue
            if isinstance(stage.downsample, PatchMerging) and all(shifts[f"{b}.norm1"] for b in blocks):
                writers = [writer for block in blocks for writer in block_writers(block)]
                readers = [reader for block in blocks for reader in readers_of(block_norms(model, block))]
                streams.append(Stream((f"layers.{s}.downsample.reduction", *writers), (*readers, last)))
        return tuple(streams)

    def open_attention(self, model: Any) -> None:
        replace_all(model, {WindowAttention: SwinAttention})

    def describe(self, model: Any) -> dict[str, Any]:
        blocks = [stage.blocks[0] for stage in model.layers]
        embed = model.patch_embed
        return {
            **describe_frame(model),
            "depths": [len(stage.blocks) for stage in model.layers],
            "num_heads": [block.attn.num_heads for block in blocks],
            "head_dim": [block.attn.qkv.weight.shape[0] // (3 * block.attn.num_heads) for block in blocks],
            "window_size": [list(block.window_size) for block in blocks],
            "always_partition": blocks[0].always_partition,
            "strict_img_size": embed.strict_img_size,
            "mlp_ratio": [mlp_ratio(block.mlp.fc1.weight.shape[0], block.dim) for block in blocks],
            "qkv_bias": blocks[0].attn.qkv.bias is not None,
            "norm": describe_norm(blocks[0].norm1, "layers.0.blocks.0.norm1"),
        }

    def build(self, description: dict[str, Any]) -> nn.Module:
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in description.items()}
        windows = tuple(tuple(window) for window in arguments["window_size"])
        arguments["window_size"] = max(windows) if len(windows) == 2 else windows  # timm reads a pair as one window
        arguments["norm_layer"] = norm_factory(arguments.pop("norm"))
        return construct(SwinTransformer, arguments)


def _pads(block: Any, size: tuple[int, int]) -> bool:
    """Whether zeros are added after norm1 to fill the last windows of a feature map of `size`."""
    sides = zip(size, block.window_size, strict=True)
    return bool(block.dynamic_mask) or any(side % window for side, window in sides)


def _final_norm(model: Any, x: Tensor) -> Tensor:
    out: Tensor = model.norm(x)
    return out
