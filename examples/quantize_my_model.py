"""Quantize a timm model that you fine-tuned, with your own folder of images, and save it.

    python examples/quantize_my_model.py vit_small_patch16_224 best.safetensors images/ --out runs/mine --val val/

`images/` needs no labels; `val/`, a folder per class, is only measured on. The number of classes is the checkpoint's.
"""

import argparse

import torch

import aphq
from aphq.models.loading import load_model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the timm name it was fine-tuned from")
    parser.add_argument("weights", help="a .safetensors or .pth file with its state_dict")
    parser.add_argument("images", help="a folder of unlabelled images, about a thousand")
    parser.add_argument("--out", required=True, help="the run folder")
    parser.add_argument("--bits", default="w8a8", help="w8a8 for speed, w4a4 or w3a3 for size")
    parser.add_argument("--effort", default="fast", help="fast for 6 to 8 bits, balanced below")
    parser.add_argument("--val", help="labelled images to measure float and quantized accuracy on")
    args = parser.parse_args()

    model = load_model(args.model, args.weights)  # or your own nn.Module, as it is after training
    run = aphq.quantize(model, args.bits, args.images, effort=args.effort, out=args.out, val=args.val)
    print(run.summary())
    print("open", run.path / "report.html")

    quantized = aphq.load(args.out)  # an nn.Module in eval mode; nothing in the folder is executed
    height, width = quantized.quantization.preprocessing.size
    with torch.no_grad():
        print("logits", tuple(quantized(torch.zeros(1, 3, height, width)).shape))


if __name__ == "__main__":
    main()
