import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from aphq.models.detection.detector import Detections, refine, scale_factor
from aphq.models.detection.masks import paste
from aphq.models.detection.regions import BOX_SIZE, MASK_SIZE, region_features
from aphq.models.detection.rpn import propose

from .golden import NETS, facts, image, needs_golden, net, tensors, unpacked
from .nets import detector, picture

EXPECTED = Path(__file__).with_name("expected.json")  # written by this project's code when it agreed with MMDetection's


def close(got: Tensor, expected: Tensor, atol: float) -> None:
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


@needs_golden
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("name", NETS)
class TestAgainstMmdetection:
    """Each step from the stored result of the step before, then everything in one go."""

    def stored(self, name: str, number: int, what: str) -> Tensor:
        return tensors(name)[f"img{number}.{what}"]

    def levels(self, name: str, number: int) -> list[Tensor]:
        return [self.stored(name, number, f"fpn.{i}")[None] for i in range(5)]

    def test_backbone_and_pyramid(self, name: str, number: int) -> None:
        maps = net(name).backbone(image(name, number)[0])
        for i, level in enumerate(maps):
            close(level[0], self.stored(name, number, f"backbone.{i}"), 1e-4)
        for i, level in enumerate(net(name).neck(maps)):
            close(level[0], self.stored(name, number, f"fpn.{i}"), 1e-4)

    def test_proposals(self, name: str, number: int) -> None:
        logits, deltas = net(name).rpn_head(self.levels(name, number))
        for i, (cls, reg) in enumerate(zip(logits, deltas, strict=True)):
            close(cls[0], self.stored(name, number, f"rpn.cls.{i}"), 1e-4)
            close(reg[0], self.stored(name, number, f"rpn.reg.{i}"), 1e-4)
        boxes, scores = propose(logits, deltas, net(name).config, image(name, number)[1])
        close(torch.cat([boxes, scores[:, None]], 1), self.stored(name, number, "proposals"), 1e-3)

    def test_box_heads(self, name: str, number: int) -> None:
        levels, size = self.levels(name, number), image(name, number)[1]
        proposals = self.stored(name, number, "proposals")[:, :4]
        close(region_features(levels, proposals[:32], BOX_SIZE), self.stored(name, number, "roi_feats"), 1e-3)
        regions, logits, deltas = net(name).look(levels, proposals, size)
        for stage in range(net(name).config.stages):
            close(regions[stage], self.stored(name, number, f"box.{stage}.rois"), 2e-3)
            close(logits[stage], self.stored(name, number, f"box.{stage}.cls"), 1e-3)
            close(deltas[stage], self.stored(name, number, f"box.{stage}.reg"), 1e-3)

    def test_masks(self, name: str, number: int) -> None:
        levels, (_, size, original), model = self.levels(name, number), image(name, number), net(name)
        found = self.stored(name, number, "det.rescaled.boxes")[:, :4]
        labels = self.stored(name, number, "det.rescaled.labels")
        features = region_features(levels, found * torch.tensor(scale_factor(size, original)), MASK_SIZE)
        close(features[:2], self.stored(name, number, "mask_feats"), 1e-3)
        for stage, head in enumerate(model.roi_head.mask_heads):
            logits = head(features)
            every = self.stored(name, number, f"mask.{stage}.logits_all")
            close(logits[: len(every)], every, 2e-3)
            own = self.stored(name, number, f"mask.{stage}.logits_pred")
            close(logits[torch.arange(len(own)), labels[: len(own)]], own, 2e-3)
        if model.config.stages > 1:
            scaled = found * torch.tensor(scale_factor(size, original))
            mean = model.mask_probabilities(levels, scaled, labels)
            close(mean[:4], self.stored(name, number, "mask.prob_mean_pred"), 1e-3)

    def test_detections_as_resized(self, name: str, number: int) -> None:
        """In the coordinates of the resized image, with its masks."""
        pixels, size, _ = image(name, number)
        found = net(name)(pixels, size)
        close(torch.cat([found.boxes, found.scores[:, None]], 1), self.stored(name, number, "det.scaled.boxes"), 1e-3)
        assert torch.equal(found.labels, self.stored(name, number, "det.scaled.labels"))
        info = facts(name)["images"][number]
        masks = unpacked(self.stored(name, number, "masks.scaled4"), info["mask_shape_scaled4"])
        assert (found.masks[:4] != masks).sum() <= 4

    def test_detections(self, name: str, number: int) -> None:
        found = net(name)(*image(name, number))
        close(torch.cat([found.boxes, found.scores[:, None]], 1), self.stored(name, number, "det.rescaled.boxes"), 1e-3)
        assert torch.equal(found.labels, self.stored(name, number, "det.rescaled.labels"))
        info = facts(name)["images"][number]
        masks = unpacked(self.stored(name, number, "masks.rescaled"), info["mask_shape_rescaled"])
        assert found.masks.shape == masks.shape
        assert (found.masks != masks).sum() <= 2


@pytest.mark.parametrize("kind", ["mask_rcnn", "cascade_mask_rcnn"])
def test_finds_what_it_found_before(kind: str) -> None:
    found = detector(kind)(picture(50, 90), None, (100, 150))
    got = {
        "boxes": found.boxes.tolist(),
        "scores": found.scores.tolist(),
        "labels": found.labels.tolist(),
        "areas": found.masks.sum((1, 2)).tolist(),
    }
    expected = json.loads(EXPECTED.read_text())[kind]
    assert len(found) >= 5
    assert got["labels"] == expected["labels"]
    assert got["boxes"] == [pytest.approx(box, abs=1e-2) for box in expected["boxes"]]
    assert got["scores"] == pytest.approx(expected["scores"], abs=1e-4)
    assert got["areas"] == pytest.approx(expected["areas"], abs=3)


def test_a_region_that_ends_at_the_top_is_never_an_object() -> None:
    """Anchors above the image are clipped to such regions; MMDetection takes them for filling."""
    model = detector()
    regions = torch.tensor([[0.0, 0.0, 30.0, 0.0], [0.0, 0.0, 30.0, 30.0]])
    found, _, _ = model.final_boxes(
        [regions], [torch.tensor([[9.0, 0, 0, 0]] * 2)], [torch.zeros(2, 12)], (64, 96), None
    )
    assert found.tolist() == [[0, 0, 30, 30]]


def test_cascade_averages_logits_not_probabilities() -> None:
    model = detector("cascade_mask_rcnn")
    regions = [torch.tensor([[0.0, 0.0, 40.0, 40.0]])] * 3
    logits = [torch.tensor([[4.0, 0.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0, 6.0]]), torch.zeros(1, 4)]
    _, scores, _ = model.final_boxes(regions, logits, [torch.zeros(1, 12)] * 3, (64, 96), None)
    assert scores[0].item() == pytest.approx(torch.tensor([4 / 3, 0, 0, 2]).softmax(0)[0].item(), abs=1e-6)


def test_refinement_leaves_the_background_out() -> None:
    region, logits = torch.tensor([[10.0, 10.0, 30.0, 30.0]]), torch.tensor([[0.0, 1.0, 5.0]])
    deltas = torch.tensor([[9.0, 9.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]])
    moved = refine(region, logits, deltas, (0.1, 0.1, 0.2, 0.2), (100, 100))
    assert moved.tolist() == [[12.0, 10.0, 32.0, 30.0]]


def test_an_image_without_objects_gives_nothing() -> None:
    model = detector()
    model.roi_head.bbox_head.fc_cls.bias[-1] = 1e4  # type: ignore[union-attr, index]
    found = model(picture())
    assert isinstance(found, Detections)
    assert len(found) == 0
    assert found.masks.shape == (0, 64, 96)


def test_padding_does_not_attract_boxes() -> None:
    """Boxes stay inside the image itself, not inside its padded frame."""
    padded = torch.nn.functional.pad(picture(50, 70), (0, 26, 0, 14))
    found = detector()(padded, (50, 70))
    assert found.boxes[:, 2].max() <= 70
    assert found.boxes[:, 3].max() <= 50


def test_configuration_survives_a_round_trip() -> None:
    config = detector("cascade_mask_rcnn").config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert dataclasses.replace(config, kind="mask_rcnn").stages == 1


def test_masks_are_pasted_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    probabilities, boxes = torch.rand(5, 28, 28), torch.tensor([[3.0, 4.0, 40.0, 30.0]] * 5)
    whole = paste(probabilities, boxes, (50, 60))
    monkeypatch.setattr("aphq.models.detection.masks.ELEMENTS_AT_ONCE", 50 * 60 * 2)
    assert torch.equal(paste(probabilities, boxes, (50, 60)), whole)
