"""Train a narrow Swin Mask R-CNN or Cascade Mask R-CNN on a few COCO images until it knows them by heart.

No public detector weights are needed to see what quantization costs: an over-fitted detector has sharp scores, boxes
and masks to lose. The images are resized once and live on the device; nothing is augmented, so that the anchors'
targets are computed once as well. The first `--images` images of the file are learned, the others stay unseen:
calibrate on those.

    python scripts/detection/train.py --kind mask_rcnn --coco instances.json --images-dir val2017 --out trained/mask

writes model.safetensors, model.json (its DetectorConfig and preprocessing), learned.json (the annotations of the
learned images), unseen.txt (names of the others) and log.jsonl. `--backbone` starts from a timm Swin of that width.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision.ops import box_iou, roi_align
from torchvision.transforms.functional import pil_to_tensor

from aphq.data.scenes import ScenePreprocessing
from aphq.models.detection.anchors import grid_anchors
from aphq.models.detection.boxes import encode
from aphq.models.detection.config import CASCADE_STDS, STRIDES, DetectorConfig
from aphq.models.detection.detector import Detector, refine
from aphq.models.detection.regions import BOX_SIZE, MASK_SIZE, region_features
from aphq.models.detection.rpn import STDS, flatten_anchors, propose

NARROW: dict[str, Any] = {
    "embed_dim": 64,
    "depths": (2, 2, 6, 2),
    "num_heads": (2, 4, 8, 16),
    "pyramid_channels": 128,
    "fc_channels": 512,
}
ANCHORS_PER_IMAGE, REGIONS_PER_IMAGE, MASKS_PER_IMAGE = 256, 192, 24
PROPOSALS = 300  # per image in training ...
RENEWED_EVERY = 4  # ... made anew every so many times an image is seen: they change slowly, and cost small kernels
STAGE_IOUS, STAGE_WEIGHTS = (0.5, 0.6, 0.7), (1.0, 0.5, 0.25)
WARMUP, WEIGHT_DECAY, CLIP_NORM = 100, 0.02, 2.0
LOG_EVERY = 50


@dataclass
class Sample:
    """An image with everything that is learned from it, on the device."""

    pixels: Tensor  # [3, height, width], normalised and padded to the canvas of its orientation
    size: tuple[int, int]  # without padding
    boxes: Tensor  # [objects, 4]
    labels: Tensor  # [objects]
    masks: Tensor  # uint8 [objects, height, width], on the canvas
    anchor_labels: Tensor  # [anchors]: 1 object, 0 none, -1 unclear
    anchor_targets: Tensor  # [anchors, 4]
    seen: int = 0  # times
    proposals: Tensor | None = None  # [proposals, 4], as of the last renewal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("mask_rcnn", "cascade_mask_rcnn"), required=True)
    parser.add_argument("--coco", type=Path, required=True)
    parser.add_argument("--images-dir", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--images", type=int, default=60, help="how many images to learn")
    parser.add_argument("--seconds", type=float, default=200.0, help="time to train, after everything is loaded")
    parser.add_argument("--steps", type=int, default=None, help="instead of a time")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--shortest", type=int, default=320)
    parser.add_argument("--backbone", type=Path, default=None, help="timm Swin weights to start from")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True

    source = json.loads(args.coco.read_text())
    rules = ScenePreprocessing(shortest=args.shortest, longest=int(args.shortest * 5 / 3))
    config = DetectorConfig.from_dict({**NARROW, "kind": args.kind, "num_classes": len(source["categories"])})
    args.out.mkdir(parents=True, exist_ok=True)
    learned = split(source, args)
    samples = load(learned, args.images_dir, rules, device)
    model = Detector(config).to(device)
    if args.backbone is not None:
        start_from(model, load_file(args.backbone))
    train(model, samples, args, device)
    model.eval()
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, args.out / "model.safetensors")
    facts = {"config": config.to_dict(), "preprocessing": rules.to_dict()}
    (args.out / "model.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(json.dumps(found_again(model, samples)), flush=True)


def split(source: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The annotations of the learned images; what is left over is listed for calibration."""
    annotated = {a["image_id"] for a in source["annotations"] if not a["iscrowd"]}
    images = sorted(source["images"], key=lambda image: image["id"])
    chosen = [image for image in images if image["id"] in annotated][: args.images]
    ids = {image["id"] for image in chosen}
    learned = {
        "images": chosen,
        "annotations": [a for a in source["annotations"] if a["image_id"] in ids],
        "categories": source["categories"],
    }
    (args.out / "learned.json").write_text(json.dumps(learned))
    unseen = [image["file_name"] for image in images if image["id"] not in ids]
    (args.out / "unseen.txt").write_text("\n".join(unseen) + "\n")
    return learned


# -- data --------------------------------------------------------------------------------------------------------------


def load(source: dict[str, Any], folder: Path, rules: ScenePreprocessing, device: torch.device) -> list[Sample]:
    categories = sorted(category["id"] for category in source["categories"])
    canvas = {}  # orientation -> size that holds all its images
    scenes = {i["id"]: rules.scene(Image.open(folder / i["file_name"]).convert("RGB")) for i in source["images"]}
    for scene in scenes.values():
        tall = scene.size[0] > scene.size[1]
        before = canvas.get(tall, (0, 0))
        canvas[tall] = tuple(max(b, s + -s % rules.divisor) for b, s in zip(before, scene.size, strict=True))
    anchors = {tall: anchors_of(size, device) for tall, size in canvas.items()}
    samples = []
    for id_, scene in scenes.items():
        tall = scene.size[0] > scene.size[1]
        objects = [a for a in source["annotations"] if a["image_id"] == id_ and not a["iscrowd"]]
        fy, fx = (new / old for new, old in zip(scene.size, scene.original, strict=True))
        boxes = torch.tensor([[x, y, x + w, y + h] for x, y, w, h in (a["bbox"] for a in objects)], device=device)
        boxes = boxes * torch.tensor([fx, fy, fx, fy], device=device)
        masks = [pil_to_tensor(outline(a["segmentation"], canvas[tall], fx, fy))[0] for a in objects]
        pixels = rules.normalise(scene.pixels.to(device))[0]
        pixels = F.pad(pixels, (0, canvas[tall][1] - pixels.shape[2], 0, canvas[tall][0] - pixels.shape[1]))
        labels = torch.tensor([categories.index(a["category_id"]) for a in objects], device=device)
        targets = match_anchors(anchors[tall], boxes)
        samples.append(Sample(pixels, scene.size, boxes, labels, torch.stack(masks).to(device), *targets))
    return samples


def outline(polygons: list[list[float]], size: tuple[int, ...], fx: float, fy: float) -> Image.Image:
    """Polygons filled, in the pixels of the resized image."""
    mask = Image.new("L", (size[1], size[0]))
    for polygon in polygons:
        points = [(x * fx, y * fy) for x, y in zip(polygon[::2], polygon[1::2], strict=True)]
        ImageDraw.Draw(mask).polygon(points, fill=1, outline=1)
    return mask


def anchors_of(size: tuple[int, ...], device: torch.device) -> Tensor:
    """Of all levels of an image of `size`, in the order of the proposal head."""
    levels = []
    height, width = size[0] // STRIDES[0], size[1] // STRIDES[0]
    for stride in STRIDES:
        levels.append(grid_anchors((height, width), stride, device))
        height, width = -(-height // 2), -(-width // 2)
    return torch.cat(levels)


def match_anchors(anchors: Tensor, boxes: Tensor) -> tuple[Tensor, Tensor]:
    """An anchor is an object's from IoU 0.7 on, or where the object has no better one; none's below 0.3."""
    iou = box_iou(anchors, boxes)
    best, which = iou.max(1)
    labels = torch.full_like(which, -1)
    labels[best < 0.3] = 0
    labels[best >= 0.7] = 1
    for number, most in enumerate(iou.max(0).values):
        closest = (iou[:, number] >= most.clamp_min(0.1) - 1e-4).nonzero().flatten()
        labels[closest] = 1
        which[closest] = number
    return labels, encode(anchors, boxes[which], STDS)


def start_from(model: Detector, state: dict[str, Tensor]) -> None:
    """timm's names to ours: there the merging stands at the start of a stage, here at the end of the one before."""
    own = model.backbone.state_dict()
    taken = {}
    for name, tensor in state.items():
        merge = re.match(r"layers\.(\d+)\.downsample\.(.*)", name)
        name = f"layers.{int(merge[1]) - 1}.downsample.{merge[2]}" if merge else name
        if name in own and own[name].shape == tensor.shape:
            taken[name] = tensor.float()
    if len(taken) < 0.9 * len(own):
        raise SystemExit(f"only {len(taken)} of {len(own)} backbone tensors fit: is the Swin of another width?")
    model.backbone.load_state_dict(taken, strict=False)


# -- losses ------------------------------------------------------------------------------------------------------------


def losses(model: Detector, batch: list[Sample]) -> dict[str, Tensor]:
    device = batch[0].pixels.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        levels = model.levels(torch.stack([sample.pixels for sample in batch]))
        logits, deltas = model.rpn_head(levels)
    levels, logits, deltas = ([x.float() for x in maps] for maps in (levels, logits, deltas))
    found = proposal_losses(logits, deltas, batch)
    regions = [
        torch.cat([proposals_of(sample, *_one(i, logits, deltas), model.config), sample.boxes])
        for i, sample in enumerate(batch)
    ]
    for stage in range(model.config.stages):
        chosen = [choose_regions(r, s, STAGE_IOUS[stage]) for r, s in zip(regions, batch, strict=True)]
        features = features_of(levels, [c[0] for c in chosen], BOX_SIZE)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            cls, reg = model.roi_head.box_heads[stage](features)
        cls, reg = cls.float(), reg.float()
        weight = STAGE_WEIGHTS[stage]
        box = box_losses(cls, reg, chosen, model.num_classes, stage)
        found |= {f"{name}{stage}": weight * value for name, value in box.items()}
        found[f"mask{stage}"] = weight * mask_loss(model, stage, levels, chosen, batch)
        if stage + 1 < model.config.stages:
            counts = [len(c[0]) for c in chosen]
            with torch.no_grad():
                parts = zip(chosen, cls.split(counts), reg.split(counts), batch, strict=True)
                regions = [
                    torch.cat([refine(c[0], a, b, CASCADE_STDS[stage], s.size), s.boxes]) for c, a, b, s in parts
                ]
                regions = [r[((r[:, 2:] - r[:, :2]) > 1).all(1)] for r in regions]
    return found


@torch.no_grad()
def proposals_of(sample: Sample, logits: list[Tensor], deltas: list[Tensor], config: DetectorConfig) -> Tensor:
    if sample.proposals is None or sample.seen % RENEWED_EVERY == 0:
        sample.proposals = propose(logits, deltas, config, sample.size)[0][:PROPOSALS]
    sample.seen += 1
    return sample.proposals


def features_of(levels: list[Tensor], regions: list[Tensor], size: int) -> Tensor:
    """Of the regions of every image, one image after the other, with one RoIAlign per level for all of them."""
    counts = torch.tensor([len(boxes) for boxes in regions])
    images = torch.arange(len(regions)).repeat_interleave(counts)
    return region_features(levels, torch.cat(regions), size, images)


def _one(index: int, *maps: list[Tensor]) -> list[list[Tensor]]:
    return [_of(index, of) for of in maps]


def _of(index: int, maps: list[Tensor]) -> list[Tensor]:
    return [x[index : index + 1] for x in maps]


def proposal_losses(logits: list[Tensor], deltas: list[Tensor], batch: list[Sample]) -> dict[str, Tensor]:
    cls_loss, reg_loss = [], []
    for i, sample in enumerate(batch):
        score = torch.cat([flatten_anchors(x, 1)[:, 0] for x in _of(i, logits)])
        delta = torch.cat([flatten_anchors(x, 4) for x in _of(i, deltas)])
        positive = draw((sample.anchor_labels == 1).nonzero().flatten(), ANCHORS_PER_IMAGE // 2)
        negative = draw((sample.anchor_labels == 0).nonzero().flatten(), ANCHORS_PER_IMAGE - len(positive))
        picked = torch.cat([positive, negative])
        target = (sample.anchor_labels[picked] == 1).float()
        cls_loss.append(F.binary_cross_entropy_with_logits(score[picked], target))
        distance = F.smooth_l1_loss(delta[positive], sample.anchor_targets[positive], beta=1 / 9, reduction="sum")
        reg_loss.append(distance / ANCHORS_PER_IMAGE)
    return {"rpn_cls": torch.stack(cls_loss).mean(), "rpn_reg": torch.stack(reg_loss).mean()}


Chosen = tuple[Tensor, Tensor, Tensor, Tensor]  # regions, which object is nearest, its box, its label (-1: none)


@torch.no_grad()
def choose_regions(regions: Tensor, sample: Sample, iou: float) -> Chosen:
    """A quarter objects, the rest background."""
    overlap, which = box_iou(regions, sample.boxes).max(1)
    positive = draw((overlap >= iou).nonzero().flatten(), REGIONS_PER_IMAGE // 4)
    negative = draw((overlap < iou).nonzero().flatten(), REGIONS_PER_IMAGE - len(positive))
    picked = torch.cat([positive, negative])
    labels = sample.labels[which[picked]].clone()
    labels[len(positive) :] = -1
    return regions[picked], which[picked], sample.boxes[which[picked]], labels


def box_losses(cls: Tensor, reg: Tensor, chosen: list[Chosen], classes: int, stage: int) -> dict[str, Tensor]:
    regions, _, objects, labels = (torch.cat(parts) for parts in zip(*chosen, strict=True))
    target = torch.where(labels < 0, classes, labels)
    positive = (labels >= 0).nonzero().flatten()
    wanted = encode(regions[positive], objects[positive], CASCADE_STDS[stage])
    deltas = reg.unflatten(1, (-1, 4))[positive, labels[positive]]
    distance = F.smooth_l1_loss(deltas, wanted, beta=1.0, reduction="sum") / len(labels)
    return {"cls": F.cross_entropy(cls, target), "reg": distance}


def mask_loss(model: Detector, stage: int, levels: list[Tensor], chosen: list[Chosen], batch: list[Sample]) -> Tensor:
    inside, targets, labels = [], [], []
    for sample, (regions, which, _, label) in zip(batch, chosen, strict=True):
        positive = (label >= 0).nonzero().flatten()[:MASKS_PER_IMAGE]
        masks = sample.masks[which[positive]].float()[:, None]
        each = torch.cat([torch.arange(len(positive)).to(regions)[:, None], regions[positive]], dim=1)
        targets.append(roi_align(masks, each, 2 * MASK_SIZE, aligned=True)[:, 0] >= 0.5)
        inside.append(regions[positive])
        labels.append(label[positive])
    if not sum(map(len, labels)):
        return levels[0].sum() * 0
    device = levels[0].device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits = model.roi_head.mask_heads[stage](features_of(levels, inside, MASK_SIZE)).float()
    label = torch.cat(labels)
    own = logits[torch.arange(len(label), device=device), label]
    return F.binary_cross_entropy_with_logits(own, torch.cat(targets).float())


def draw(indices: Tensor, most: int) -> Tensor:
    return indices[torch.randperm(len(indices), device=indices.device)[:most]]


# -- training ----------------------------------------------------------------------------------------------------------


def train(model: Detector, samples: list[Sample], args: argparse.Namespace, device: torch.device) -> None:
    model.train()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": plain, "weight_decay": 0.0}]
    optimiser = torch.optim.AdamW(groups, lr=args.lr, fused=device.type == "cuda")
    shapes = sorted({tuple(sample.pixels.shape) for sample in samples})
    groups_of = [[s for s in samples if tuple(s.pixels.shape) == shape] for shape in shapes]
    weights = torch.tensor([float(len(group)) for group in groups_of])
    started, step, sums = time.monotonic(), 0, {}
    with open(args.out / "log.jsonl", "w") as log:
        while True:
            seconds = time.monotonic() - started
            share = step / args.steps if args.steps else seconds / args.seconds
            if share >= 1:
                break
            for group in optimiser.param_groups:
                group["lr"] = args.lr * min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * share))
            group = groups_of[int(torch.multinomial(weights, 1))]
            batch = [group[i] for i in torch.randperm(len(group))[: args.batch].tolist()]
            found = losses(model, batch)
            total = torch.stack(list(found.values())).sum()
            optimiser.zero_grad(set_to_none=True)
            total.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimiser.step()
            step += 1
            for name, value in found.items():
                sums[name] = sums.get(name, 0) + value.detach()
            if step % LOG_EVERY == 0:
                means = {name: round(float(value) / LOG_EVERY, 4) for name, value in sums.items()}
                line = {"step": step, "seconds": round(time.monotonic() - started, 1), **means}
                log.write(json.dumps(line) + "\n")
                print(json.dumps(line), flush=True)
                sums = {}


@torch.no_grad()
def found_again(model: Detector, samples: list[Sample]) -> dict[str, float]:
    """A quick look without COCO's tools: the share of objects that are found (IoU 0.5, right class, score 0.5), and of
    such detections that are right."""
    found = right = said = objects = 0
    for sample in samples:
        height, width = (side + -side % STRIDES[3] for side in sample.size)
        detections = model(sample.pixels[None, :, :height, :width], sample.size)
        sure = detections.scores > 0.5
        same = detections.labels[sure][:, None] == sample.labels[None]
        hit = (box_iou(detections.boxes[sure], sample.boxes) > 0.5) & same
        found += int(hit.any(0).sum())
        right += int(hit.any(1).sum())
        said += int(sure.sum())
        objects += len(sample.boxes)
    return {"found": round(found / objects, 4), "right": round(right / max(1, said), 4), "objects": objects}


if __name__ == "__main__":
    main()
