"""Which tiles the kernels on bytes should use on a GPU: each layer and the attention of a ViT block, in microseconds.

    python benchmarks/byte_tiles.py --width 384 --heads 6 --tokens 197 --batch 256

Its best go into `LARGE` and `LARGE_GELU` of `kernels.byte_linear` and `BLOCK` of `kernels.byte_attention`. A tile that
does not fit the GPU is shown with the reason.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

from gpu_latency import race

TILES = (
    (128, 128, 128, 8, 3),
    (128, 128, 128, 8, 2),
    (128, 128, 64, 8, 4),
    (128, 128, 128, 4, 3),
    (128, 64, 128, 4, 3),
    (64, 128, 128, 4, 3),
    (128, 256, 128, 8, 3),
    (64, 256, 128, 8, 3),
)
BLOCKS = ((64, 256, 4), (64, 256, 8), (32, 256, 4), (128, 256, 8), (64, 0, 4), (128, 0, 8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 384), ("heads", 6), ("tokens", 197), ("batch", 256)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, call in cases(parser.parse_args()):
        try:
            print(f"{name:48s} {microseconds(call):8.1f}", flush=True)
        except Exception as problem:
            print(f"{name:48s} {' '.join(str(problem).split())[:60]}", flush=True)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Callable[[], Any]]]:
    from functools import partial

    import torch

    from aphq.kernels.byte_attention import Block, attention
    from aphq.kernels.byte_linear import Tile, linear

    rows, width = args.batch * args.tokens, args.width

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, device="cuda").to(torch.int8)

    affine = torch.tensor([0.01, -128.0, 127.0, 0.0, 100.0], device="cuda")[:, None]
    layers = {  # name: in, out, activation, bytes out
        "qkv": (width, 3 * width, "", affine.expand(5, 3 * width).contiguous()),
        "proj": (width, width, "", None),
        "fc1": (width, 4 * width, "gelu", affine),
        "fc2": (4 * width, width, "", None),
    }
    for name, (inner, columns, activation, emits) in layers.items():
        x, weight, ones = numbers(rows, inner), numbers(columns, inner), torch.ones(columns, device="cuda")
        tensors = (x, weight, ones * 1e-4, ones, ones.int(), ones[:0].int())
        for tile in TILES:
            options = {"activation": activation, "emits": emits, "whole": True, "tile": Tile(*tile)}
            yield f"{name} {tile}", partial(linear, *tensors, torch.float32, **options)
    qkv = numbers(args.batch, args.tokens, 3, args.heads, width // args.heads).permute(2, 0, 3, 1, 4)
    softmax = torch.tensor([0.003, 0.0, 255.0, 128.0, 333.0], device="cuda")[:, None]
    affines = torch.stack([affine, affine, softmax, affine]).expand(4, 5, args.heads).contiguous()
    given = (*qkv.unbind(0), 0.125, None, affines, torch.float32, affine[:, 0].contiguous(), False, False)
    for block in BLOCKS:
        yield f"attention {block}", partial(attention, *given, block=Block(*block))


def microseconds(call: Callable[[], Any], rounds: int = 20) -> float:
    """The median."""
    import statistics

    for _ in range(5):
        call()
    return 1000 * statistics.median(race({"": call}, rounds)[""])


if __name__ == "__main__":
    main()
