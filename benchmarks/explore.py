"""Choices made on calibration images alone: some are held out, and each variant is judged by how it treats those.

    python benchmarks/explore.py --model deit_tiny_patch16_224 --weights W.safetensors --calib DIR --hold 160 \\
        --base w3a3:balanced:steps=2000 --then joint_tuning:steps=1000 --then joint_tuning:steps=1000:views.every=0 \\
        --base w3a3:balanced:steps=2000:+rotation --out R.jsonl

A base is a run of `accuracy.py`; each `--then` is joint tuning with the fields named, started from the base before it.
A line says, for the images that were used and for those held out (each with its mirror image): the KL divergence from
the float model, and the share of equal predictions. With `--by-unit` also, for each unit, the divergence when that unit
alone is quantized: where the two kinds of images part, that unit has learned the images.

Held out are images of classes that used ones show too, going by the float model's predictions, as validation images are
of such classes mostly. With `--any-class` they are any: of a thousand images of a thousand classes most then show a
class that no used image does, which is another question. Lines without `classes` were made so.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import json
import logging
import pathlib
import time
from dataclasses import replace

from subject import model_of, parser_for


class InOrder(argparse.Action):
    """--base and --then, in the order in which they were given."""

    def __call__(self, parser, namespace, values, option=None):
        namespace.jobs = [*(namespace.jobs or []), (option.lstrip("-"), values)]


def main() -> None:
    parser = parser_for(__doc__)
    parser.add_argument("--hold", type=int, default=160, help="images held out of 1024")
    parser.add_argument("--any-class", action="store_true", help="hold out the last images, whatever they show")
    parser.add_argument("--use", type=int, default=None, help="quantize with so many of the others; default all")
    parser.add_argument("--used", type=int, default=None, help="measure on so many of the used images; default all")
    parser.add_argument("--seed", type=int, default=3407)
    parser.add_argument("--base", action=InOrder, dest="jobs")
    parser.add_argument("--then", action=InOrder, dest="jobs")
    parser.add_argument("--by-unit", action="store_true", help="the divergence that each unit of a base makes alone")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="a JSON lines file to append to")
    args = parser.parse_args()

    import torch
    from accuracy import recipe_of

    import aphq
    from aphq.data import Preprocessing, load_calibration

    logging.basicConfig(level=logging.WARNING)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = model_of(args).to(device)
    every = load_calibration(args.calib, Preprocessing.of_model(model), count=1024, seed=args.seed, whole=True)
    if not args.any_class:
        every = reordered(every, held_last(classes_of(model, every, device), args.hold))
    used = every.first(args.use or len(every) - args.hold)
    held = replace(every, images=every.images[len(every) - args.hold :], names=(), whole=None, aspects=None)
    base_model, base_name = None, ""
    for kind, text in args.jobs:
        started = time.time()
        if kind == "base":
            recipe = recipe_of(text, args.seed)
            base_model, base_name = aphq.quantize(model, recipe, used).model, text
            quantized = base_model
        else:
            quantized, put_back = tuned(model, base_model, text, used, device)
        seconds = time.time() - started
        line = {
            "model": args.model, "base": base_name, "then": text if kind == "then" else "", "seed": args.seed,
            "quantized_with": len(used), "classes": "any" if args.any_class else "used",
            "used": measure(model, quantized, used.first(args.used or len(used)), device),
            "held": measure(model, quantized, held, device),
            "seconds": round(seconds, 1), "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        }  # fmt: skip
        if kind == "then":
            line["put_back"] = put_back  # the figures are then those of the base
        if args.by_unit and kind == "base":
            line["by_unit"] = each_unit(model, quantized, (used.first(args.used or len(used)), held), device)
        with open(args.out, "a") as handle:
            handle.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def classes_of(model, images, device):
    """What the float model sees in each image."""
    import torch

    from aphq.models.architecture import predict

    with torch.no_grad():
        found = [predict(model, images.batch(slice(i, i + 128), device)).argmax(1) for i in range(0, len(images), 128)]
    return torch.cat(found).tolist()


def held_last(classes, count):
    """Indices of all images, at the end `count` of classes that others before them show too."""
    left, held = collections.Counter(classes), []
    for index in reversed(range(len(classes))):
        if len(held) < count and left[classes[index]] > 1:
            left[classes[index]] -= 1
            held.append(index)
    if len(held) < count:
        raise SystemExit(f"only {len(held)} images can be held out so that their classes stay: --hold {len(held)}")
    return [*sorted(set(range(len(classes))) - set(held)), *reversed(held)]


def reordered(images, order):
    names = tuple(images.names[i] for i in order)
    return replace(images, images=images.images[order], names=names, whole=images.whole[order],
                   aspects=images.aspects[order], files=None)  # fmt: skip


def workspace(model, student, recipe, images, device):
    """The float model, turned as the student was, and the student."""
    from aphq.engine.folder import RunFolder
    from aphq.engine.progress import Progress
    from aphq.engine.store import Store
    from aphq.engine.workspace import Workspace
    from aphq.models.architecture import architecture_of
    from aphq.stages.rotation import rotate

    architecture = architecture_of(model)
    teacher = copy.deepcopy(model).eval().requires_grad_(False)
    store = Store(device, gpu_bytes=None, host_bytes=None, folder=None)
    work = Workspace(
        teacher, student, architecture.units(teacher), images, recipe, device, store, RunFolder(None), Progress(),
        streams=architecture.streams(teacher),
    )  # fmt: skip
    rotation = recipe.stage("rotation")
    if rotation is not None:  # the student was turned with its own copy of the teacher; turn ours alike
        work.student = copy.deepcopy(student)
        rotate(work, rotation)
        work.student = student
    return work


def tuned(model, base, text, images, device):
    """A copy of the base after joint tuning, and whether that did harm and was put back."""
    import torch

    from aphq.artifact.info import info_of
    from aphq.models.student import finalise
    from aphq.recipe import JointTuning
    from aphq.stages.joint_tuning import tune_jointly

    recipe = info_of(base).recipe.including(JointTuning())
    _, *changes = text.split(":")
    for change in changes:
        path, value = change.split("=", 1)
        with contextlib.suppress(ValueError):
            value = json.loads(value)
        recipe = recipe.with_value(f"joint_tuning.{path}", value)
    student = copy.deepcopy(base)
    work, told = workspace(model, student, recipe, images, device), []
    work.folder.event = lambda _, **data: told.append(data)
    tune_jointly(work, recipe.stage("joint_tuning"))
    finalise(student)
    torch.cuda.empty_cache()
    return student, any(data.get("put_back") for data in told)


def each_unit(model, quantized, sets, device):
    """{unit: [divergence on each set of images]} of the float model with that unit from the quantized one."""
    import torch
    import torch.nn.functional as F

    from aphq.artifact.info import info_of
    from aphq.models.architecture import run_units

    work = workspace(model, quantized, info_of(quantized).recipe, sets[0], device)
    found = {unit.name: [0.0] * len(sets) for unit in work.units}
    for number, images in enumerate(sets):
        for start in range(0, len(images), 128):
            x = images.batch(slice(start, start + 128), device)
            with torch.no_grad():
                expected = run_units(work.teacher, work.units, x).log_softmax(1)
                for place, unit in enumerate(work.units):
                    logits = run_units(work.teacher, work.units[place + 1 :], run_units(quantized, [unit], x))
                    divergence = F.kl_div(logits.log_softmax(1), expected, log_target=True, reduction="sum")
                    found[unit.name][number] += float(divergence) / len(images)
                    x = run_units(work.teacher, [unit], x)
    return {name: [round(value, 4) for value in values] for name, values in found.items()}


def measure(model, quantized, images, device):
    import torch
    import torch.nn.functional as F

    divergence, equal, count = 0.0, 0, 0
    with torch.no_grad():
        for start in range(0, len(images), 128):
            x = images.batch(slice(start, start + 128), device)
            for view in (x, x.flip(-1)):
                a, b = model(view).log_softmax(1), quantized(view).log_softmax(1)
                divergence += float(F.kl_div(b, a, log_target=True, reduction="sum"))
                equal += int((a.argmax(1) == b.argmax(1)).sum())
                count += len(view)
    return {"kl": round(divergence / count, 4), "agreement": round(100 * equal / count, 2), "images": count}


if __name__ == "__main__":
    main()
