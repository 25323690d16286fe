"""COCO's average precision of boxes and masks: IoU 0.5 to 0.95, up to 100 detections per image, crowds ignored.

Counted by faster-coco-eval, which gives pycocotools' numbers in a third of its time.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from aphq.data.coco import CocoData, CocoImage
from aphq.data.scenes import ScenePreprocessing
from aphq.errors import DataError
from aphq.models.detection.detector import Detections
from aphq.models.detection.family import family_of

Result = dict[str, Any]  # one detection in COCO's format for results
MISSING = "measuring detectors needs faster-coco-eval: pip install 'aphq[detection]'"


@dataclass(frozen=True)
class AveragePrecision:
    """Of one kind of outline, in per cent."""

    ap: float
    ap50: float
    ap75: float
    small: float  # areas below 32 x 32 pixels
    medium: float
    large: float  # from 96 x 96 pixels


@dataclass(frozen=True)
class DetectionAccuracy:
    """Over `images` images, of which `unannotated` show nothing."""

    box: AveragePrecision
    mask: AveragePrecision | None  # None for a detector without masks
    images: int
    unannotated: int = 0

    def __str__(self) -> str:
        kinds = (("box", self.box), ("mask", self.mask))
        parts = (f"{kind} AP {p.ap:.2f} (50: {p.ap50:.2f}, 75: {p.ap75:.2f})" for kind, p in kinds if p is not None)
        empty = f", {self.unannotated} without annotations" if self.unannotated else ""
        return f"{'  '.join(parts)}  ({self.images} images{empty})"

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> DetectionAccuracy:
        mask = None if data["mask"] is None else AveragePrecision(**data["mask"])
        return cls(AveragePrecision(**data["box"]), mask, data["images"], data["unannotated"])


def evaluate(
    models: Mapping[str, nn.Module],
    data: CocoData,
    preprocessing: ScenePreprocessing,
    *,
    device: torch.device | str = "cpu",
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    keep: Callable[[Result], None] | None = None,
) -> dict[str, DetectionAccuracy]:
    """The box and mask AP of detectors on the same images; `keep` gets every detection, to save them."""
    ids = {name: class_ids(model, data) for name, model in models.items()}
    images = data.images[:limit]
    if not images:
        raise DataError("there is no image to evaluate on")
    results: dict[str, list[Result]] = {name: [] for name in models}
    for image in images:
        picture = image.open()
        for name, model in models.items():
            found = to_results(detect(model, picture, preprocessing, device), image, data, ids[name])
            results[name] += found
            if keep:
                for result in found:
                    keep(result)
        if progress:
            progress(1)
    masks = {name: family_of(model).has_masks(model) for name, model in models.items()}
    return {name: measure(data, found, images, masks[name]) for name, found in results.items()}


def class_ids(model: nn.Module, data: CocoData) -> tuple[int, ...]:
    """The category of each class of a detector; DataError if the annotations are for other classes."""
    family = family_of(model)
    return data.class_ids(family.num_classes(model), family.numbered_by_id)


@torch.no_grad()
def detect(
    model: nn.Module, image: Any, preprocessing: ScenePreprocessing, device: torch.device | str = "cpu"
) -> Detections:
    """What a detector finds in a decoded image, in that image's pixels."""
    scene = preprocessing.scene(image)
    pixels = preprocessing.normalise(scene.pixels.to(device))
    return family_of(model).detect(model, pixels, scene.size, scene.original)


def to_results(found: Detections, image: CocoImage, data: CocoData, ids: Sequence[int] | None = None) -> list[Result]:
    """Detections in COCO's format: boxes as (x, y, width, height), masks run-length encoded. `ids` are the categories
    of the classes where those are not the file's in their order."""
    boxes, scores, labels = found.boxes.tolist(), found.scores.tolist(), found.labels.tolist()
    ids = ids or data.categories
    results: list[Result] = []
    for (x1, y1, x2, y2), score, label in zip(boxes, scores, labels, strict=True):
        box = [x1, y1, x2 - x1, y2 - y1]
        results.append({"image_id": image.id, "category_id": ids[label], "bbox": box, "score": score})
    if found.masks is not None:
        for result, mask in zip(results, found.masks.cpu().numpy().astype(np.uint8), strict=True):
            result["segmentation"] = {"size": list(mask.shape), "counts": run_lengths(mask)}
    return results


def run_lengths(mask: npt.NDArray[np.uint8]) -> list[int]:
    """How many 0, then 1, then 0 ... follow each other down the columns: readable without COCO's tools."""
    flat = np.concatenate([[0], mask.T.reshape(-1)])
    changes = np.flatnonzero(np.diff(flat))
    return [int(count) for count in np.diff(np.concatenate([[0], changes, [len(flat) - 1]]))]


def measure(
    data: CocoData, results: Iterable[Result], images: Iterable[CocoImage] | None = None, masks: bool = True
) -> DetectionAccuracy:
    """The AP of results in COCO's format, over some of the images or all; of `masks` too, if the results have them."""
    chosen = tuple(images or data.images)
    results = list(results)
    ids = [image.id for image in chosen]
    known = set(ids)
    stray = [result["image_id"] for result in results if result["image_id"] not in known]
    if stray:
        raise DataError(f"there are detections for image {stray[0]}, which is not among the {len(ids)} measured")
    annotated = {a["image_id"] for a in data.source["annotations"]}
    box = _precision(data, results, ids, "bbox")
    mask = _precision(data, results, ids, "segm") if masks else None
    return DetectionAccuracy(box, mask, len(ids), sum(id_ not in annotated for id_ in ids))


def _precision(data: CocoData, results: list[Result], ids: list[int], kind: str) -> AveragePrecision:
    if not results:
        return AveragePrecision(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    # a record for masks must not carry a box: its area would be taken for the mask's
    outline = "bbox" if kind == "bbox" else "segmentation"
    own = [{key: r[key] for key in ("image_id", "category_id", "score", outline)} for r in results]
    library = _library()
    for record in own if kind == "segm" else ():
        if isinstance(record["segmentation"]["counts"], list):
            record["segmentation"] = library.mask.frPyObjects(record["segmentation"], *record["segmentation"]["size"])
    with contextlib.redirect_stdout(io.StringIO()):
        truth = library.COCO(data.source, use_deepcopy=True)
        counter = library.COCOeval_faster(truth, truth.loadRes(own), kind)
        counter.params.imgIds = ids
        counter.evaluate()
        counter.accumulate()
        counter.summarize()
    # -1 stands for "no such object in the set"
    return AveragePrecision(*(100 * max(0.0, float(value)) for value in counter.stats[:6]))


def _library() -> Any:
    try:
        import faster_coco_eval
    except ImportError:
        raise DataError(MISSING) from None
    return faster_coco_eval
