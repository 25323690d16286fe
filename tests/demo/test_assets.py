import numpy as np
import pytest
import torch

from aphq.demo.assets import load_assets
from aphq.evaluation.classification import compare


def test_the_embedded_model_and_images_fit_and_the_model_is_good() -> None:
    assets = load_assets()
    assert assets.calibration.shape == (1024, 1, 28, 28)
    assert assets.calibration.dtype == torch.uint8
    assert len(assets.class_names) == 10
    assert not assets.model.training
    found = compare({"float": assets.model}, assets.test, assets.preprocessing, limit=500)
    assert found.accuracy["float"].top1 > 88


def test_no_test_image_is_among_the_calibration_images() -> None:
    assets = load_assets()
    seen = {image.tobytes() for image in assets.calibration.numpy()}
    assert not [i for i, image in enumerate(assets.test.images.numpy()) if image.tobytes() in seen]


def test_nothing_is_unpickled(monkeypatch: pytest.MonkeyPatch) -> None:
    load = np.load
    monkeypatch.setattr(np, "load", lambda *a, **k: load(*a, **{**k, "allow_pickle": False}))
    monkeypatch.setattr(torch, "load", lambda *a, **k: pytest.fail("something was unpickled"))
    load_assets()
