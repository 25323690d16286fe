import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aphq.detection import DETECTORS, Detector, DetectorConfig, load_detector
from aphq.errors import ModelError
from aphq.models.detection.checkpoint import fill, own_names, traits
from aphq.models.loading import load_model

from .golden import SHARED
from .nets import TINY, detector, picture

PARAMS = {
    "mask_rcnn_swin_t": "mask_rcnn_swin_tiny",
    "mask_rcnn_swin_s": "mask_rcnn_swin_small",
    "cascade_mask_rcnn_swin_t": "cascade_mask_rcnn_swin_tiny",
    "cascade_mask_rcnn_swin_s": "cascade_mask_rcnn_swin_small",
}
SIZES: dict[str, Any] = {k: v for k, v in TINY.items() if k != "num_classes"}
needs_params = pytest.mark.skipif(not (SHARED / "params").is_dir(), reason="needs ../shared/detection/params")


def with_derived(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """As files have it: one index of relative positions in every block."""
    blocks = [key.removesuffix("relative_position_bias_table") for key in state if key.endswith("bias_table")]
    return {**state, **{f"{block}relative_position_index": torch.zeros(49, 49, dtype=torch.long) for block in blocks}}


def mmdetection_spelling(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names and orders to those of MMDetection's own Swin, as its conversion of such files does it."""
    out = {}
    for key, tensor in state.items():
        if ".downsample." in key:
            groups = tensor.reshape(*tensor.shape[:-1], 4, -1)[..., [0, 2, 1, 3], :]
            tensor = groups.transpose(-1, -2).reshape(tensor.shape)
        if key.startswith("backbone."):
            key = key.replace("layers.", "stages.").replace(".attn.", ".attn.w_msa.")
            key = key.replace(".mlp.fc1.", ".ffn.layers.0.0.").replace(".mlp.fc2.", ".ffn.layers.1.")
            key = key.replace("patch_embed.proj.", "patch_embed.projection.")
        out[key] = tensor
    return out


@needs_params
@pytest.mark.parametrize("spelling", ["swin", "mmdetection"])
@pytest.mark.parametrize("name", DETECTORS)
def test_every_tensor_of_the_public_detectors_is_accounted_for(name: str, spelling: str) -> None:
    listed = json.loads((SHARED / "params" / f"{PARAMS[name]}.json").read_text())
    state = {key: torch.empty(shape, device="meta") for key, shape, _ in listed["entries"]}
    if spelling == "mmdetection":
        state = mmdetection_spelling(state)
    with torch.device("meta"):
        model = Detector(DETECTORS[name])
    ours = own_names(state)
    assert traits(ours)["depths"] == DETECTORS[name].depths
    fill(model, ours)  # raises if a key is missing, left over or of another shape
    assert sum(p.numel() for p in model.parameters()) == listed["num_parameter_elements"]


@pytest.mark.parametrize("spelling", ["swin", "mmdetection"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_both_spellings_load_to_the_same_detector(tmp_path: Path, kind: str, spelling: str, wrapped: bool) -> None:
    model = detector(kind)
    state = with_derived(dict(model.state_dict()))
    if spelling == "mmdetection":
        state = mmdetection_spelling(state)
    file = tmp_path / "file.pth"
    torch.save(
        {"meta": {"epoch": 36}, "state_dict": {f"module.{k}": v for k, v in state.items()}} if wrapped else state, file
    )
    loaded = load_detector(f"{kind}_swin_t", file, **SIZES)
    assert loaded.num_classes == 3  # the file's, not COCO's
    assert not loaded.training
    found, expected = loaded(picture()), model(picture())
    assert torch.equal(found.boxes, expected.boxes)
    assert torch.equal(found.masks, expected.masks)


def test_a_wrong_order_of_merging_would_be_seen() -> None:
    state = detector().state_dict()
    foreign = mmdetection_spelling(dict(state))
    key = "backbone.layers.0.downsample.reduction.weight"
    assert not torch.equal(foreign[key.replace("layers", "stages")], state[key])
    assert torch.equal(own_names(foreign)[key], state[key])


class TestRefusals:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        save_file(dict(detector("cascade_mask_rcnn").state_dict()), tmp_path / "cascade.safetensors")
        return tmp_path / "cascade.safetensors"

    def test_another_kind_of_detector(self, file: Path) -> None:
        with pytest.raises(ModelError, match="kind cascade_mask_rcnn instead of mask_rcnn"):
            load_detector("mask_rcnn_swin_t", file, **SIZES)

    def test_another_backbone_names_the_fitting_detector(self, tmp_path: Path) -> None:
        with torch.device("meta"):
            small = Detector(DETECTORS["mask_rcnn_swin_s"])
        state = {
            k: torch.zeros(1).expand(v.shape) if v.ndim else torch.zeros(()) for k, v in small.state_dict().items()
        }
        torch.save(state, tmp_path / "small.pth")
        with pytest.raises(ModelError, match=r"depths \(2, 2, 18, 2\) instead of .*use mask_rcnn_swin_s"):
            load_detector("mask_rcnn_swin_t", tmp_path / "small.pth")

    def test_a_classifier(self, tmp_path: Path, tiny_swin: torch.nn.Module) -> None:
        save_file(dict(tiny_swin.state_dict()), tmp_path / "swin.safetensors")
        with pytest.raises(ModelError, match="not a checkpoint of a Mask R-CNN"):
            load_detector("mask_rcnn_swin_t", tmp_path / "swin.safetensors")

    def test_missing_and_unexpected_tensors_are_counted_and_named(self, tmp_path: Path) -> None:
        state = dict(detector().state_dict())
        del state["neck.fpn_convs.0.conv.bias"]
        state["ema_counter"] = torch.zeros(1)
        torch.save(state, tmp_path / "odd.pth")
        with pytest.raises(
            ModelError, match=r"odd.pth: 1 missing: neck.fpn_convs.0.conv.bias; 1 unexpected: ema_counter"
        ):
            load_detector("mask_rcnn_swin_t", tmp_path / "odd.pth", **SIZES)

    def test_another_number_of_classes_than_the_files(self, file: Path) -> None:
        with pytest.raises(ModelError, match="of another shape"):
            load_detector("cascade_mask_rcnn_swin_t", file, num_classes=7, **SIZES)

    def test_no_weights_and_no_such_name(self) -> None:
        with pytest.raises(ModelError, match="needs weights"):
            load_model("mask_rcnn_swin_t")
        with pytest.raises(ModelError, match="did you mean 'mask_rcnn_swin_t'"):
            load_model("mask_rcnn_swint")

    def test_nonsense_in_the_configuration(self) -> None:
        with pytest.raises(ModelError, match="did you mean 'embed_dim'"):
            DetectorConfig.from_dict({"embed_dims": 3})
        with pytest.raises(ModelError, match="cannot be divided"):
            DetectorConfig(embed_dim=10)
        with pytest.raises(ModelError, match="must be positive"):
            DetectorConfig(detections=0)
