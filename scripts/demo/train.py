"""Train the demo's Vision Transformer on Fashion-MNIST.

The model is small enough to travel with the package and good enough that losing accuracy to quantization shows. The
60 000 images live on the device as bytes; a batch is one gather out of them (which shifts and flips at the same time)
followed by a few element-wise steps, so there is no loader to wait for. What is written is the exponential moving
average of the weights after the last step: no checkpoint is picked by test accuracy.

    python scripts/demo/train.py --data FOLDER --out src/aphq/demo/data/model.safetensors
"""

import argparse
import copy
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from idx import DEFAULT_FOLDER, Split, read_split

ARCHITECTURE: dict[str, Any] = {
    "img_size": 28,
    "patch_size": 4,
    "in_chans": 1,
    "num_classes": 10,
    "embed_dim": 128,
    "depth": 7,
    "num_heads": 4,
    "mlp_ratio": 4,
    "class_token": True,
}
MEAN, STD = 0.286, 0.353  # of the training pixels, on [0, 1]
SIZE = 28

PEAK_LR, WEIGHT_DECAY, WARMUP = 1.5e-3, 0.05, 0.04  # WARMUP: share of the run
LABEL_SMOOTHING, DROP_PATH, EMA_DECAY, CLIP_NORM = 0.1, 0.1, 0.999, 1.0
SHIFT, ERASE_PROBABILITY, ERASE_SIDES = 2, 0.25, (4, 12)
MIXUP_PROBABILITY, MIXUP_ALPHA, CUTMIX_PROBABILITY = 0.2, 0.2, 0.2
LOG_EVERY = 10  # epochs


def normalise(pixels: Tensor) -> Tensor:
    """Bytes to what the model takes: zero mean and unit variance over the training set."""
    return (pixels.float() / 255 - MEAN) / STD


class Batches:
    """The training set on the device, handing out augmented batches."""

    def __init__(self, split: Split, batch: int, seed: int, device: torch.device) -> None:
        images = torch.from_numpy(split.images.copy()).to(device)
        self.padded = F.pad(images, (SHIFT, SHIFT, SHIFT, SHIFT))  # [count, 32, 32]; the background is black
        self.labels = torch.from_numpy(split.labels.astype(np.int64)).to(device)
        self.batch, self.device = batch, device
        self.on_device = torch.Generator(device).manual_seed(seed)
        self.on_host = np.random.default_rng(seed)  # per-batch choices, drawn here so that the device never waits

    @property
    def per_epoch(self) -> int:
        """Full batches in an epoch; the rest of the permutation is dropped."""
        return len(self.labels) // self.batch

    def order(self) -> tuple[Tensor, ...]:
        """The image indices of each batch of a new epoch."""
        permutation = torch.randperm(len(self.labels), generator=self.on_device, device=self.device)
        return permutation[: self.per_epoch * self.batch].split(self.batch)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
        """An augmented batch: images [batch, 1, 28, 28], two labels for each, and the first label's share."""
        labels = self.labels[index]
        images = self._erase(normalise(self._shift_and_flip(index)))
        images, partners, share = self._mix(images)
        return images[:, None], labels, labels[partners], share

    def _uniform(self, low: int, high: int, count: int) -> Tensor:
        return torch.randint(low, high, (count, 1), generator=self.on_device, device=self.device)

    def _shift_and_flip(self, index: Tensor) -> Tensor:
        count, steps = len(index), torch.arange(SIZE, device=self.device)
        rows = steps + self._uniform(0, 2 * SHIFT + 1, count)  # [batch, 28]
        mirrored = torch.where(self._uniform(0, 2, count).bool(), SIZE - 1 - steps, steps)
        columns = mirrored + self._uniform(0, 2 * SHIFT + 1, count)
        return self.padded[index[:, None, None], rows[:, :, None], columns[:, None, :]]

    def _erase(self, images: Tensor) -> Tensor:
        """Blank a random rectangle, to the mean, in some of the images."""
        count, steps = len(images), torch.arange(SIZE, device=self.device)
        inside = []
        for _ in range(2):
            side = self._uniform(ERASE_SIDES[0], ERASE_SIDES[1] + 1, count)
            start = self._uniform(0, SIZE, count) - side // 2
            inside.append((steps >= start) & (steps < start + side))  # [batch, 28]
        chosen = torch.rand(count, 1, 1, generator=self.on_device, device=self.device) < ERASE_PROBABILITY
        return images.masked_fill(chosen & inside[0][:, :, None] & inside[1][:, None, :], 0.0)

    def _mix(self, images: Tensor) -> tuple[Tensor, Tensor, float]:
        """Mixup, cutmix or nothing for the whole batch; returns the partners' indices and the share that is kept."""
        partners = torch.randperm(len(images), generator=self.on_device, device=self.device)
        draw = self.on_host.random()
        if draw < MIXUP_PROBABILITY:
            share = float(self.on_host.beta(MIXUP_ALPHA, MIXUP_ALPHA))
            return images.lerp(images[partners], 1 - share), partners, share
        if draw < MIXUP_PROBABILITY + CUTMIX_PROBABILITY:
            side = round(SIZE * math.sqrt(self.on_host.random()))
            top, left = (int(start) for start in self.on_host.integers(0, SIZE - side + 1, size=2))
            box = (slice(None), slice(top, top + side), slice(left, left + side))
            images[box] = images[partners][box]
            return images, partners, 1 - side**2 / SIZE**2
        return images, partners, 1.0


def build_model(drop_path: float = 0.0) -> VisionTransformer:
    """The demo's architecture; `drop_path` only matters in training."""
    return VisionTransformer(**ARCHITECTURE, drop_path_rate=drop_path)


def build_optimiser(model: VisionTransformer) -> torch.optim.AdamW:
    """AdamW that decays the matrices only: not the biases, norms, position embedding or class token."""
    exempt = model.no_weight_decay()
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if parameter.ndim < 2 or name in exempt else matrices).append(parameter)
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_LR, fused=matrices[0].is_cuda)


def learning_rate(progress: float) -> float:
    """Linear warm-up, then half a cosine down to zero, over a run that goes from 0 to 1."""
    if progress < WARMUP:
        return PEAK_LR * progress / WARMUP
    return PEAK_LR * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - WARMUP) / (1 - WARMUP))))


@torch.no_grad()
def update_average(average: nn.Module, model: nn.Module, step: int) -> None:
    """Move the average towards the model, faster at first so that the initial weights are soon forgotten."""
    weight = 1 - min(EMA_DECAY, (1 + step) / (10 + step))
    for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(parameter, weight)


@torch.inference_mode()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of `images` (bytes, [count, 28, 28]) that `model` classifies right, in float32."""
    model.eval()
    correct = torch.zeros((), dtype=torch.long, device=labels.device)
    for part, expected in zip(images.split(1000), labels.split(1000), strict=True):
        correct += (model(normalise(part)[:, None]).argmax(dim=1) == expected).sum()
    return correct.item() / len(labels)


def train(args: argparse.Namespace, device: torch.device, images: Tensor, labels: Tensor) -> tuple[nn.Module, float]:
    """Run the training; returns the averaged model and the epochs done. The test set is only used for the log."""
    batches = Batches(read_split(args.data, "train"), args.batch, args.seed, device)
    model = build_model(DROP_PATH).to(device).train()
    average = copy.deepcopy(model).eval().requires_grad_(False)
    optimiser = build_optimiser(model)
    forward = torch.compile(model) if args.compile else model

    started, step, total = time.monotonic(), 0, args.epochs * batches.per_epoch
    for epoch in range(1, args.epochs + 1):
        loss_sum = torch.zeros((), device=device)
        for index in batches.order():
            # Where the time runs out before the epochs do, the schedule follows the clock, so it still ends at zero.
            progress = max(step / total, (time.monotonic() - started) / args.limit_seconds)
            if progress >= 1:
                return average, step / batches.per_epoch
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(progress)
            inputs, first, second, share = batches.take(index)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
                logits = forward(inputs)
            logits = logits.float()
            loss = share * F.cross_entropy(logits, first, label_smoothing=LABEL_SMOOTHING)
            loss = loss + (1 - share) * F.cross_entropy(logits, second, label_smoothing=LABEL_SMOOTHING)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimiser.step()
            update_average(average, model, step)
            loss_sum += loss.detach()
            step += 1
        if epoch % LOG_EVERY == 0 or epoch == args.epochs:
            seconds = time.monotonic() - started
            print(
                f"epoch {epoch:4d}/{args.epochs}  loss {loss_sum.item() / batches.per_epoch:.4f}  "
                f"EMA test accuracy {accuracy(average, images, labels):.2%}  {seconds:.0f} s",
                flush=True,
            )
    return average, step / batches.per_epoch


def main() -> None:
    """Train, round to float16, score what was rounded and write it with its facts."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    test = read_split(args.data, "t10k")
    images = torch.from_numpy(test.images.copy()).to(device)
    labels = torch.from_numpy(test.labels.astype(np.int64)).to(device)

    started = time.monotonic()
    average, epochs = train(args, device, images, labels)
    seconds = time.monotonic() - started

    rounded = {name: tensor.half().cpu().contiguous() for name, tensor in average.state_dict().items()}
    model = build_model()
    model.load_state_dict(rounded)  # copies into float32 parameters
    score = accuracy(model.to(device), images, labels)

    command = f"python scripts/demo/train.py --epochs {args.epochs} --batch {args.batch} --seed {args.seed}"
    if math.isfinite(args.limit_seconds):
        command += f" --limit-seconds {args.limit_seconds:g}"
    facts = {
        "architecture": ARCHITECTURE,
        "mean": MEAN,
        "std": STD,
        "test_accuracy": score,
        "epochs": round(epochs, 2),
        "seed": args.seed,
        "command": command + (" --compile" if args.compile else ""),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(rounded, args.out, metadata={name: json.dumps(fact) for name, fact in facts.items()})
    print(
        f"{args.out}: {args.out.stat().st_size / 1e6:.2f} MB, {epochs:.2f} epochs in {seconds:.0f} s, "
        f"test accuracy as float16 {score:.2%}"
    )


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_FOLDER, help="where the four IDX files are")
    parser.add_argument("--out", type=Path, required=True, help="the safetensors file to write")
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-seconds", type=float, default=math.inf, help="end the training by then")
    parser.add_argument("--device", help="default: cuda where there is one, otherwise cpu")
    parser.add_argument("--compile", action="store_true", help="use torch.compile: slower to start, faster per step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
