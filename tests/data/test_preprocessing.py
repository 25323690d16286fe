import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

from aphq.data import Preprocessing, open_images
from aphq.errors import DataError

from .conftest import picture

CONFIGS = [
    Preprocessing((224, 224), crop_pct=0.9),
    Preprocessing((64, 64), crop_pct=0.875, interpolation="bilinear"),
    Preprocessing((32, 32), crop_pct=1.0, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    Preprocessing((32, 32), crop_pct=1.15),
    Preprocessing((48, 32), crop_pct=0.9),
    Preprocessing((32, 32), crop_pct=0.95, crop_mode="squash"),
    Preprocessing((32, 48), crop_pct=0.95, crop_mode="squash", interpolation="lanczos"),
    Preprocessing((32, 32), crop_pct=1.0, crop_mode="border"),
    Preprocessing((32, 32), crop_pct=0.8, crop_mode="border"),
    Preprocessing((32, 32), channels=1, mean=(0.4,), std=(0.2,), crop_mode="border"),
]


def timm_transform(p: Preprocessing) -> Any:
    return timm.data.create_transform(
        p.shape,
        interpolation=p.interpolation,
        mean=p.mean,
        std=p.std,
        crop_pct=p.crop_pct,
        crop_mode=p.crop_mode,
    )


class TestTransform:
    @pytest.mark.parametrize("p", CONFIGS, ids=str)
    @pytest.mark.parametrize("size", [(60, 40), (300, 257), (1, 1)], ids=str)
    def test_is_timms_evaluation_transform(self, p: Preprocessing, size: tuple[int, int]) -> None:
        image = picture(*size).convert("RGB" if p.channels == 3 else "L")
        ours = p.eval_transform(image)
        assert ours.dtype == torch.uint8
        assert ours.shape == p.shape
        assert ours.is_contiguous()
        torch.testing.assert_close(p.normalise(ours[None])[0], timm_transform(p)(image), rtol=1e-6, atol=1e-6)

    def test_on_real_images(self, imagenet: Path) -> None:
        files = open_images(imagenet / "calib")
        p = CONFIGS[0]
        for i in range(0, 1000, 200):
            image = files.open(i)
            torch.testing.assert_close(p.normalise(p.eval_transform(image)[None])[0], timm_transform(p)(image))

    def test_converts_the_mode(self) -> None:
        rgba = picture().convert("RGBA")
        assert CONFIGS[1].eval_transform(rgba).equal(CONFIGS[1].eval_transform(picture()))
        assert CONFIGS[-1].eval_transform(picture()).shape == (1, 32, 32)


class TestNormalise:
    def test_pixels(self) -> None:
        p = Preprocessing((1, 1), mean=(0.0, 0.5, 0.5), std=(1.0, 0.5, 0.25))
        batch = torch.tensor([0, 255, 255], dtype=torch.uint8).view(1, 3, 1, 1)
        assert p.normalise(batch).flatten().tolist() == [0.0, 1.0, 2.0]
        assert batch.flatten().tolist() == [0, 255, 255]  # not in place

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
    def test_floats_pass_unchanged(self, dtype: torch.dtype) -> None:
        batch = torch.randn(2, 3, 4, 4).to(dtype)
        normalised = Preprocessing((4, 4)).normalise(batch)
        assert normalised.dtype == torch.float32
        assert normalised.equal(batch.float())

    def test_other_integers_are_refused(self) -> None:
        with pytest.raises(DataError, match="int64"):
            Preprocessing((4, 4)).normalise(torch.zeros(1, 3, 4, 4, dtype=torch.int64))


class TestDict:
    @pytest.mark.parametrize("p", CONFIGS, ids=str)
    def test_round_trips_through_json(self, p: Preprocessing) -> None:
        again = Preprocessing.from_dict(json.loads(json.dumps(p.to_dict())))
        assert again == p
        assert hash(again) == hash(p)

    @pytest.mark.parametrize(
        ("change", "key"),
        [
            ({"colour": 1}, "colour"),
            ({"size": 224}, "size"),
            ({"size": [224]}, "size"),
            ({"size": [224, 224.5]}, "size"),
            ({"size": [0, 224]}, "size"),
            ({"channels": 4}, "channels"),
            ({"channels": True}, "channels"),
            ({"channels": 1}, "mean"),
            ({"mean": [0.5, 0.5]}, "mean"),
            ({"mean": ["a", "b", "c"]}, "mean"),
            ({"std": [0.5, 0.5, 0.0]}, "std"),
            ({"interpolation": "cubic"}, "interpolation"),
            ({"crop_pct": "0.9"}, "crop_pct"),
            ({"crop_pct": 0}, "crop_pct"),
            ({"crop_mode": None}, "crop_mode"),
        ],
    )
    def test_a_bad_key_is_named(self, change: dict[str, Any], key: str) -> None:
        with pytest.raises(DataError, match=f"'{key}'"):
            Preprocessing.from_dict(Preprocessing((224, 224)).to_dict() | change)

    def test_a_missing_key_is_named(self) -> None:
        d = Preprocessing((224, 224)).to_dict()
        del d["std"]
        with pytest.raises(DataError, match="'std' is missing"):
            Preprocessing.from_dict(d)

    def test_must_be_a_mapping(self) -> None:
        with pytest.raises(DataError, match="mapping"):
            Preprocessing.from_dict([1, 2])  # type: ignore[arg-type]


class TestOfModel:
    def test_follows_the_pretrained_config(self) -> None:
        vit = timm.create_model("vit_tiny_patch16_224", depth=1)
        assert Preprocessing.of_model(vit) == Preprocessing(
            (224, 224), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), crop_pct=0.9
        )
        swin = timm.create_model("swin_tiny_patch4_window7_224", embed_dim=12, depths=(1, 1, 1, 1))
        assert Preprocessing.of_model(swin) == Preprocessing((224, 224), crop_pct=0.9)

    def test_the_size_and_channels_it_was_built_with_win(self) -> None:
        model = timm.create_model("deit_tiny_patch16_224", depth=1, img_size=(96, 64), in_chans=1)
        p = Preprocessing.of_model(model)
        assert p.shape == (1, 96, 64)
        assert p.mean == pytest.approx([(0.485 + 0.456 + 0.406) / 3])
        assert p.std == pytest.approx([(0.229 + 0.224 + 0.225) / 3])
        assert model(p.normalise(p.eval_transform(picture())[None])).shape == (1, 1000)

    def test_a_model_from_elsewhere_gets_imagenets_habits(self) -> None:
        assert Preprocessing.of_model(nn.Linear(2, 2)) == Preprocessing((224, 224))

    def test_other_channel_counts_are_refused(self) -> None:
        model = timm.create_model("deit_tiny_patch16_224", depth=1, in_chans=4)
        with pytest.raises(DataError, match=r"'channels' must be 1 or 3, got 4"):
            Preprocessing.of_model(model)
