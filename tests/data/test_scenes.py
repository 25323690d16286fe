import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from aphq.data.scenes import ScenePreprocessing, resize
from aphq.errors import DataError

GOLDEN = Path(__file__).parents[3] / "shared" / "detection" / "golden"
needs_golden = pytest.mark.skipif(not GOLDEN.is_dir(), reason="needs ../shared/detection/golden")


def test_resizing_is_bilinear() -> None:
    ramp = np.arange(0, 200, 10, dtype=np.uint8)[None, :, None].repeat(20, 0).repeat(3, 2)
    wide = resize(ramp, (40, 40))
    assert wide.shape == (40, 40, 3)
    assert np.abs(np.diff(wide[5, 2:-2, 0].astype(int)) - 5).max() <= 1
    assert (wide == wide[:1]).all()
    assert np.array_equal(resize(ramp, (20, 20)), ramp)


def test_shrinking_does_not_smooth() -> None:
    """Every second pixel of a chessboard is picked by OpenCV's bilinear resizing only in part: no average of four."""
    board = (np.indices((40, 40)).sum(0) % 2 * 255).astype(np.uint8)[..., None].repeat(3, 2)
    assert resize(board, (10, 10)).std() < 1
    spots = np.zeros((40, 40, 3), np.uint8)
    spots[::4, ::4] = 255
    assert not resize(spots, (10, 10)).any()  # the samples fall between the spots


def test_size_keeps_the_ratio_and_both_limits() -> None:
    rules = ScenePreprocessing()
    assert rules.resized((480, 640)) == (800, 1067)
    assert rules.resized((229, 640)) == (477, 1333)
    assert rules.resized((1, 5000)) == (1, 1333)


@needs_golden
def test_sizes_are_mmdetections() -> None:
    for case in json.loads((GOLDEN / "units.json").read_text())["resize_sizes_1333x800"]:
        assert list(ScenePreprocessing().resized(tuple(case["ori_hw"]))) == case["new_hw"]


@needs_golden
@pytest.mark.parametrize("number", range(4))
def test_pixels_are_mmdetections(number: int) -> None:
    stored = load_file(GOLDEN / "units.safetensors")
    rules = ScenePreprocessing(shortest=40, longest=67)
    bgr = stored[f"prep.{number}.raw_bgr"].numpy()
    scene = rules.scene(Image.fromarray(np.ascontiguousarray(bgr[:, :, ::-1])))
    assert torch.equal(scene.pixels.permute(1, 2, 0).flip(2), stored[f"prep.{number}.resized_bgr"])
    torch.testing.assert_close(rules.normalise(scene.pixels)[0], stored[f"prep.{number}.out"], rtol=0, atol=1e-5)


def test_padding_is_zero_after_normalising() -> None:
    image = ScenePreprocessing(shortest=20, longest=40).normalise(torch.full((3, 20, 40), 7, dtype=torch.uint8))
    assert image.shape == (1, 3, 32, 64)
    assert not image[:, :, 20:].any()
    assert not image[:, :, :, 40:].any()
    assert image[0, 0, 0, 0] == pytest.approx((7 - 123.675) / 58.395, abs=1e-4)


def test_settings_survive_a_round_trip_and_nonsense_is_refused() -> None:
    rules = ScenePreprocessing(shortest=320, longest=533)
    assert ScenePreprocessing.from_dict(json.loads(json.dumps(rules.to_dict()))) == rules
    with pytest.raises(DataError, match="longest no less"):
        ScenePreprocessing(shortest=900, longest=800)
    with pytest.raises(DataError, match="did you mean 'shortest'"):
        ScenePreprocessing.from_dict({**rules.to_dict(), "shortes": 3})
