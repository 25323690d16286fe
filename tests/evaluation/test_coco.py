import contextlib
import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from aphq.data.coco import CocoData, open_coco
from aphq.data.scenes import ScenePreprocessing
from aphq.errors import DataError
from aphq.evaluation.coco import DetectionAccuracy, detect, evaluate, measure, to_results
from aphq.models.detection import Detections

from ..coco_set import write
from ..models.detection.nets import detector

COCO = Path(__file__).parents[3] / "shared" / "coco"
mask_tools: Any = pytest.importorskip("pycocotools.mask")
SMALL = ScenePreprocessing(shortest=48, longest=80)


@pytest.fixture
def data(tmp_path: Path) -> CocoData:
    return open_coco(*write(tmp_path))


def truth(data: CocoData) -> list[dict[str, Any]]:
    """The annotations, crowds left out, as if they were detections."""
    sizes = {image.id: image.size for image in data.images}
    results = []
    for a in data.source["annotations"]:
        if not a["iscrowd"]:
            runs = mask_tools.merge(mask_tools.frPyObjects(a["segmentation"], *sizes[a["image_id"]]))
            runs = {"size": runs["size"], "counts": runs["counts"].decode()}
            keys = {key: a[key] for key in ("image_id", "category_id", "bbox")}
            results.append({**keys, "score": 1.0, "segmentation": runs})
    return results


def perturbed(results: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Boxes moved, masks shifted, scores and some classes at random, and false alarms."""
    rng = random.Random(seed)
    out = []
    for result in results:
        x, y, w, h = result["bbox"]
        box = [x + rng.gauss(0, 0.06) * w, y + rng.gauss(0, 0.06) * h, w * rng.uniform(0.9, 1.1), h]
        mask = np.roll(mask_tools.decode(result["segmentation"]), rng.choice([0, 1, 3]), axis=1)
        runs = mask_tools.encode(np.asfortranarray(mask))
        runs = {"size": runs["size"], "counts": runs["counts"].decode()}
        score = rng.random()
        out.append({**result, "bbox": box, "segmentation": runs, "score": score})
        if rng.random() < 0.3:
            out.append({**out[-1], "bbox": [0, 0, w, h], "score": rng.random()})
    return out


def by_pycocotools(data: CocoData, results: list[dict[str, Any]], kind: str) -> list[float]:
    from pycocotools import coco
    from pycocotools.cocoeval import COCOeval

    outline = "bbox" if kind == "bbox" else "segmentation"
    own = [{key: r[key] for key in ("image_id", "category_id", "score", outline)} for r in results]
    with contextlib.redirect_stdout(io.StringIO()):
        reference = coco.COCO()
        reference.dataset = data.source
        reference.createIndex()
        counter = COCOeval(reference, reference.loadRes(own), kind)
        counter.evaluate()
        counter.accumulate()
        counter.summarize()
    return [100 * max(0.0, float(value)) for value in counter.stats[:6]]


def numbers(found: DetectionAccuracy, kind: str) -> list[float]:
    return list(vars(found.box if kind == "bbox" else found.mask).values())


def test_the_truth_is_perfect(data: CocoData) -> None:
    found = measure(data, truth(data))
    assert (found.box.ap, found.mask.ap) == (pytest.approx(100), pytest.approx(100))
    assert (found.images, found.unannotated) == (3, 1)


@pytest.mark.parametrize("kind", ["bbox", "segm"])
def test_perturbed_detections_measure_as_pycocotools_says(data: CocoData, kind: str) -> None:
    results = perturbed(truth(data))
    found = measure(data, results)
    assert 5 < found.box.ap < 95
    assert numbers(found, kind) == pytest.approx(by_pycocotools(data, results, kind), abs=1e-6)


@pytest.mark.skipif(not COCO.is_dir(), reason="needs the images of ../shared/coco")
def test_on_real_annotations_too() -> None:
    data = open_coco(COCO / "instances_val2017_100.json", COCO / "val2017")
    assert len(data.names) == 80
    found = measure(data, truth(data))
    assert (found.box.ap, found.mask.ap) == (pytest.approx(100), pytest.approx(100))
    results = perturbed(truth(data))
    found = measure(data, results)
    for kind in ("bbox", "segm"):
        assert numbers(found, kind) == pytest.approx(by_pycocotools(data, results, kind), abs=1e-6)


def test_a_detection_in_a_crowd_is_no_mistake(data: CocoData) -> None:
    inside = {**truth(data)[0], "image_id": 101, "bbox": [2, 39, 10, 8], "category_id": 3, "score": 1.0}
    runs = mask_tools.encode(np.asfortranarray(np.pad(np.ones((8, 10), np.uint8), ((39, 1), (2, 36)))))
    inside["segmentation"] = {"size": runs["size"], "counts": runs["counts"].decode()}
    weak = [{**result, "score": 0.5} for result in truth(data)]
    assert measure(data, [inside, *weak]).box.ap == pytest.approx(100)
    outside = {**inside, "bbox": [30, 2, 10, 8], "category_id": 9}
    assert measure(data, [outside, *weak]).box.ap < 100


def test_something_found_where_nothing_is_annotated_costs(data: CocoData) -> None:
    alarm = {**truth(data)[0], "image_id": 102, "score": 1.0}
    runs = mask_tools.encode(np.asfortranarray(np.ones((80, 64), np.uint8)))
    alarm["segmentation"] = {"size": runs["size"], "counts": runs["counts"].decode()}
    weak = [{**result, "score": 0.5} for result in truth(data)]
    assert measure(data, [alarm, *weak]).box.ap < 100


def test_no_detections_are_worth_nothing(data: CocoData) -> None:
    assert measure(data, []).box.ap == 0


def test_detections_of_other_images_are_refused(data: CocoData) -> None:
    with pytest.raises(DataError, match="detections for image 100"):
        measure(data, truth(data), data.images[1:])


def test_detections_become_results(data: CocoData) -> None:
    masks = torch.zeros(1, 60, 90, dtype=torch.bool)
    masks[0, 10:30, 10:40] = True
    found = Detections(torch.tensor([[10.0, 10.0, 40.0, 30.0]]), torch.tensor([0.75]), torch.tensor([0]), masks)
    (result,) = to_results(found, data.images[0], data)
    assert result["bbox"] == [10, 10, 30, 20]
    assert result["category_id"] == 3
    assert sum(result["segmentation"]["counts"][1::2]) == 600
    expected = mask_tools.encode(np.asfortranarray(masks[0].numpy().astype(np.uint8)))
    assert mask_tools.frPyObjects(result["segmentation"], 60, 90) == expected
    assert measure(data, [result]).box.ap > 0


def test_a_model_is_measured_image_by_image(data: CocoData) -> None:
    kept: list[dict[str, Any]] = []
    seen = []
    found = evaluate({"it": detector()}, data, SMALL, progress=seen.append, keep=kept.append)["it"]
    assert len(seen) == found.images == 3
    assert measure(data, kept) == found
    assert evaluate({"it": detector()}, data, SMALL, limit=1)["it"].images == 1
    assert (
        DetectionAccuracy.from_dict({"box": vars(found.box), "mask": vars(found.mask), "images": 3, "unannotated": 1})
        == found
    )
    assert "box AP" in str(found)


def test_boxes_come_back_in_the_pixels_of_the_file(data: CocoData) -> None:
    image = data.images[0].open()
    found = detect(detector(), image, SMALL)
    assert found.masks.shape[1:] == (60, 90)
    assert found.boxes[:, 2].max() <= 90


def test_a_missing_library_is_named(data: CocoData, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faster_coco_eval", None)
    with pytest.raises(DataError, match=r"pip install 'aphq\[detection\]'"):
        measure(data, truth(data))
