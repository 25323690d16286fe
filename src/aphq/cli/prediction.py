"""`aphq predict`: what a detector finds in an image, as a drawing and as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image

from aphq.artifact import info_of, load
from aphq.cli.source import float_model
from aphq.data.coco import class_names
from aphq.data.images import open_images
from aphq.data.scenes import ScenePreprocessing
from aphq.drawing import drawn, side_by_side
from aphq.engine.files import write_atomically
from aphq.errors import DataError, ModelError
from aphq.evaluation.coco import detect
from aphq.models.detection import Detections
from aphq.models.detection.family import family_of
from aphq.opening import resolve_device


def predict_and_draw(
    run: Path, image: Path, out: Path, *, weights: Path | None, threshold: float, coco: Path | None, device: str
) -> dict[str, list[dict[str, Any]]]:
    """The objects found by each detector, "float" first where it is at hand; the drawing is written to `out`."""
    kind = Image.registered_extensions().get(out.suffix.lower())
    if kind not in Image.SAVE:
        raise DataError(f"cannot tell the format of '{out}': give a name that ends in .png or .jpg")
    target = resolve_device(device)
    quantized = load(run, target)
    info = info_of(quantized)
    if info is None or not isinstance(info.preprocessing, ScenePreprocessing):
        raise ModelError(f"{run} holds a classifier; predict draws what detectors find")
    original = float_model(run, info, weights)
    models = {"quantized": quantized} if original is None else {"float": original.to(target), "quantized": quantized}
    picture = open_images(image).open(0)
    family = family_of(quantized)
    names = class_names(coco, family.num_classes(quantized), family.numbered_by_id)
    found = {
        name: above(detect(model, picture, info.preprocessing, target), threshold) for name, model in models.items()
    }
    titles = {"float": "float", "quantized": f"quantized ({info.recipe.name})"}
    drawing = side_by_side([drawn(picture, objects, names, titles[name]) for name, objects in found.items()])
    write_atomically(out, lambda path: drawing.save(path, format=kind))
    return {name: as_data(objects, names) for name, objects in found.items()}


def above(found: Detections, threshold: float) -> Detections:
    kept = found.scores >= threshold
    masks = None if found.masks is None else found.masks[kept]
    return Detections(found.boxes[kept], found.scores[kept], found.labels[kept], masks)


def as_data(found: Detections, names: tuple[str, ...]) -> list[dict[str, Any]]:
    rows = zip(found.boxes.tolist(), found.scores.tolist(), found.labels.tolist(), strict=True)
    objects: list[dict[str, Any]] = [
        {"label": names[label], "score": round(score, 4), "box": [round(side, 2) for side in box]}
        for box, score, label in rows
    ]
    if found.masks is not None:
        for thing, mask in zip(objects, found.masks, strict=True):
            thing["mask_pixels"] = int(mask.sum())
    return objects
