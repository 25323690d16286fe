"""Bring your own model: a ViT class of one's own, its adapter, and a W8A8 run of it.

    python examples/custom_model.py --out runs/mine [--data images/]

Without --data it takes random pictures: enough to see that everything fits together, not to judge accuracy.
"""

import argparse

import torch
from torch import nn

import aphq
from aphq.data import Preprocessing
from aphq.models.architecture import Architecture, Mlp, NormPair, Unit, module_step, register, replace_module, unchanged
from aphq.models.attention import OpenAttention


# --8<-- [start:model]
class MyAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # [batch, tokens, channels]
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2))


class MyMlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class MyBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width), MyAttention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width), MyMlp(width)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MyViT(nn.Module):
    """Patches, positions, blocks, the mean of the tokens, a linear head."""

    def __init__(self, size=32, patch=8, width=64, depth=4, heads=2, classes=10):
        super().__init__()
        self.arguments = {
            "size": size, "patch": patch, "width": width, "depth": depth, "heads": heads, "classes": classes,
        }  # fmt: skip
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2, width))
        self.blocks = nn.ModuleList(MyBlock(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images):
        x = self.embed(images).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))
        # --8<-- [end:model]


# --8<-- [start:adapter]
class MyOpenAttention(OpenAttention):
    """The same attention with its two products as modules (`qk`, `pv`), so that they can be quantized."""

    def __init__(self, source):
        super().__init__(source.heads, (source.qkv.in_features // source.heads) ** -0.5, fused=True)
        self.qkv, self.proj = source.qkv, source.proj

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.core(q, k, v, None).transpose(1, 2).flatten(2))


@register
class MyAdapter(Architecture):
    family = "example.MyViT"  # artifacts carry this name
    classes = (MyViT,)

    def check(self, model):
        """Nothing in a MyViT can vary that this adapter would not know."""

    def units(self, model):
        names = [f"blocks.{i}" for i in range(len(model.blocks))]
        bridges = [unchanged] * (len(names) - 1) + [lambda model, x: model.norm(x).mean(1)]
        blocks = [
            Unit(name, "block", module_step(name), bridge, (name,), self.mlp(f"{name}.mlp"), self.norms(name))
            for name, bridge in zip(names, bridges, strict=True)
        ]
        embed = Unit("embed", "patch_embed", module_step("embed"), self.to_tokens, ("embed",))
        return embed, *blocks, Unit("head", "head", module_step("head"), unchanged, ("head",))

    def mlp(self, name):
        return Mlp(name, f"{name}.fc1", f"{name}.act", f"{name}.fc2")

    def norms(self, block):  # each norm and the one layer that reads it
        return NormPair(f"{block}.norm1", f"{block}.attn.qkv"), NormPair(f"{block}.norm2", f"{block}.mlp.fc1")

    def to_tokens(self, model, x):  # the bridge from the patches to the first block
        return x.flatten(2).transpose(1, 2) + model.positions

    def open_attention(self, model):
        for name, module in list(model.named_modules()):
            if isinstance(module, MyAttention):
                replace_module(model, name, MyOpenAttention(module))

    def describe(self, model):
        return dict(model.arguments)

    def build(self, description):
        return MyViT(**description)
        # --8<-- [end:adapter]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="the run folder")
    parser.add_argument("--data", help="a folder of images; random pictures if left out")
    args = parser.parse_args()
    torch.manual_seed(0)
    model = MyViT()  # yours comes with trained weights
    data = args.data or torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    run = aphq.quantize(model, "w8a8", data, effort="fast", out=args.out, preprocessing=Preprocessing(size=(32, 32)))
    print(run.summary())
    again = aphq.load(args.out)  # needs this file imported, for the class and its adapter
    probe = torch.randn(4, 3, 32, 32)
    print("loaded, equal to the model in memory:", torch.equal(again(probe), run.model.cpu()(probe)))


if __name__ == "__main__":
    main()
