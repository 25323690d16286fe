"""The parts of a detector by hand-made cases, and each against MMDetection's own results where those are at hand."""

import numpy as np
import pytest
import torch
from torch import Tensor

from aphq.models.detection.anchors import base_anchors, grid_anchors
from aphq.models.detection.boxes import best_per_class, clip, decode, encode, suppress
from aphq.models.detection.config import CASCADE_STDS, STRIDES
from aphq.models.detection.masks import paste, sample
from aphq.models.detection.pyramid import coarsest
from aphq.models.detection.regions import level_of, region_features
from aphq.models.detection.rpn import STDS
from aphq.models.detection.swin import Swin, shift_mask

from .golden import facts, needs_golden, tensors
from .nets import detector

CODERS = {"rpn": STDS, "s0": CASCADE_STDS[0], "s1": CASCADE_STDS[1], "s2": CASCADE_STDS[2]}


def stored(name: str) -> Tensor:
    return tensors("units")[name]


# -- anchors -----------------------------------------------------------------------------------------------------------


def test_anchors_sit_on_corners_and_ratio_is_height_to_width() -> None:
    anchors = grid_anchors((2, 3), 4)
    assert anchors.shape == (18, 4)
    wide, square, tall = anchors[-3:]  # the last cell: row 1, column 2
    assert square.tolist() == [8 - 16, 4 - 16, 8 + 16, 4 + 16]
    assert (wide[2] - wide[0]) == pytest.approx(32 * 2**0.5)
    assert (tall[3] - tall[1]) == pytest.approx(32 * 2**0.5)


@needs_golden
def test_anchors_are_mmdetections() -> None:
    sizes = facts("units")["anchors"]["feature_sizes_hw"]
    for level, stride in enumerate(STRIDES):
        torch.testing.assert_close(base_anchors(stride), stored(f"anchors.base.{level}"))
        torch.testing.assert_close(grid_anchors(tuple(sizes[level]), stride), stored(f"anchors.grid.{level}"))


# -- boxes -------------------------------------------------------------------------------------------------------------


def test_encoding_is_undone_by_decoding() -> None:
    generator = torch.Generator().manual_seed(0)
    boxes, targets = ((torch.rand(20, 2, 2, generator=generator) + 0.1).cumsum(1).flatten(1) * 50 for _ in range(2))
    deltas = encode(boxes, targets, CASCADE_STDS[1])
    torch.testing.assert_close(decode(boxes, deltas, CASCADE_STDS[1]), targets, rtol=1e-4, atol=1e-3)


def test_growth_is_bounded_both_ways() -> None:
    box, delta = torch.tensor([[0.0, 0.0, 16.0, 16.0]]), torch.tensor([[0.0, 0.0, 50.0, -50.0]])
    x1, y1, x2, y2 = decode(box, delta, STDS)[0].tolist()
    assert x2 - x1 == pytest.approx(1000)
    assert y2 - y1 == pytest.approx(16 * 16 / 1000)


def test_clipping_is_to_the_size_itself() -> None:
    assert clip(torch.tensor([-5.0, -5.0, 500.0, 500.0]), (30, 40)).tolist() == [0, 0, 40, 30]


@needs_golden
@pytest.mark.parametrize("coder", CODERS)
def test_decoding_is_mmdetections(coder: str) -> None:
    boxes, deltas, size = stored("coder.rois"), stored("coder.deltas"), tuple(facts("units")["coder"]["max_shape_hw"])
    for got, name in (
        (decode(boxes, deltas[:, :4], CODERS[coder], size), "out4_clip"),
        (decode(boxes, deltas, CODERS[coder], size), "out20_clip"),
        (decode(boxes, deltas[:, :4], CODERS[coder]), "out4_noclip"),
    ):
        torch.testing.assert_close(got, stored(f"coder.{coder}.{name}"), rtol=1e-5, atol=1e-3)


def test_suppression_is_strict_and_by_group() -> None:
    boxes = torch.tensor([[0.0, 0.0, 10.0, 10.0], [0.0, 0.0, 10.0, 5.0], [0.0, 0.0, 10.0, 10.0]])
    scores = torch.tensor([0.9, 0.8, 0.7])
    assert suppress(boxes, scores, torch.tensor([0, 0, 1]), 0.5).tolist() == [0, 1, 2]  # exactly 0.5 stays
    assert suppress(boxes, scores, torch.tensor([0, 0, 0]), 0.5).tolist() == [0, 1]
    assert suppress(boxes[:0], scores[:0], torch.zeros(0), 0.5).tolist() == []


def test_many_boxes_are_suppressed_group_by_group(monkeypatch: pytest.MonkeyPatch) -> None:
    boxes = torch.rand(200, 2, 2).cumsum(1).flatten(1) * 30
    scores, groups = torch.rand(200), torch.randint(0, 4, (200,))
    together = suppress(boxes, scores, groups, 0.5)
    monkeypatch.setattr("aphq.models.detection.boxes.MOVED_APART", 100)
    assert torch.equal(suppress(boxes, scores, groups, 0.5), together)


@needs_golden
@pytest.mark.parametrize("iou", [0.5, 0.7])
def test_suppression_is_mmdetections(iou: float) -> None:
    kept = suppress(stored("nms.boxes"), stored("nms.scores"), stored("nms.idxs"), iou)
    assert torch.equal(kept, stored(f"nms.{iou}.keep").long())


@needs_golden
def test_detections_of_many_classes_are_mmdetections() -> None:
    names = [name for name in tensors("units") if name.startswith("mcnms.")]
    boxes, scores = stored("mcnms.boxes"), stored("mcnms.scores")
    cases = [(boxes, ""), (stored("nms.boxes")[:60], "agnostic_")]
    for given, prefix in cases:
        found, score, labels = best_per_class(given, scores, 0.05, 0.5, 30)
        torch.testing.assert_close(torch.cat([found, score[:, None]], 1), stored(f"mcnms.{prefix}dets"))
        assert torch.equal(labels, stored(f"mcnms.{prefix}labels").long()), names


# -- regions -----------------------------------------------------------------------------------------------------------


def test_levels_change_at_112_224_and_448() -> None:
    sides = torch.tensor([0.0, 111.9, 112.1, 223.9, 224.1, 447.9, 448.1, 5000.0])
    boxes = torch.stack([torch.zeros(8), torch.zeros(8), sides, sides], dim=1)
    assert level_of(boxes).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_no_region_gives_no_features() -> None:
    levels = [torch.rand(1, 8, 32 // 2**i, 32 // 2**i) for i in range(5)]
    assert region_features(levels, torch.zeros(0, 4), 7).shape == (0, 8, 7, 7)


def test_regions_of_several_images_are_read_each_from_its_own() -> None:
    levels = [torch.randn(2, 8, 64 // 2**i, 96 // 2**i, generator=torch.Generator().manual_seed(i)) for i in range(5)]
    boxes = torch.tensor([[4.0, 4, 40, 50], [10, 20, 300, 200], [0, 0, 20, 20]])
    images = torch.tensor([1, 0, 1])
    found = region_features(levels, boxes, 7, images)
    for number, image in enumerate(images.tolist()):
        alone = region_features([level[image : image + 1] for level in levels], boxes[number : number + 1], 7)
        assert torch.equal(found[number : number + 1], alone)


@needs_golden
def test_region_features_are_mmdetections() -> None:
    levels = [stored(f"extractor.feat.{i}") for i in range(4)]
    levels = [level if level.ndim == 4 else level[None] for level in levels]
    boxes = stored("extractor.rois")
    boxes = boxes[:, 1:] if boxes.shape[1] == 5 else boxes
    assert torch.equal(level_of(boxes), stored("extractor.levels").long())
    for size in (7, 14):
        torch.testing.assert_close(
            region_features(levels, boxes, size), stored(f"extractor.out{size}"), rtol=0, atol=1e-4
        )


# -- masks -------------------------------------------------------------------------------------------------------------


def test_a_full_mask_fills_its_box() -> None:
    pasted = paste(torch.ones(1, 28, 28), torch.tensor([[2.0, 3.0, 7.0, 9.0]]), (12, 14))[0]
    expected = torch.zeros(12, 14, dtype=torch.bool)
    expected[3:9, 2:7] = True
    assert torch.equal(pasted, expected)


@needs_golden
def test_pasting_is_mmdetections() -> None:
    info = facts("units")["paste"]
    size = (info["img_h"], info["img_w"])
    logits, boxes = stored("paste.logits"), stored("paste.boxes")[:, :4]
    probabilities = logits.reshape(len(logits), *logits.shape[-2:]).sigmoid()
    got, expected = sample(probabilities, boxes, size), stored("paste.prob_full")
    known = expected >= 0
    torch.testing.assert_close(got[known], expected[known], rtol=0, atol=1e-5)
    packed = stored("paste.bin_tight_cpu").numpy()
    tight = np.unpackbits(packed, axis=1)[:, : size[0] * size[1]].reshape(-1, *size).astype(bool)
    differing = (paste(probabilities, boxes, size).numpy() != tight).any((1, 2)).nonzero()[0]
    assert set(differing.tolist()) <= {4}  # the box without width, where MMDetection's two devices differ as well


# -- backbone and pyramid ----------------------------------------------------------------------------------------------


def test_shifted_windows_keep_the_wrapped_parts_apart() -> None:
    mask = shift_mask(14, 14, 7, 3, torch.device("cpu"))
    assert mask.shape == (4, 49, 49)
    assert not mask[0].any()  # only the last row and column of windows hold what was wrapped around
    assert set(mask[-1].unique().tolist()) == {-100.0, 0.0}
    first, last = 0, 48  # opposite corners of the last window come from opposite corners of the map
    assert mask[-1, first, last] == -100


@needs_golden
def test_masks_of_windows_are_mmdetections() -> None:
    names = [name for name in tensors("units") if name.startswith("swin.attn_mask.")]
    assert names
    for name in names:
        height, width = (int(side) for side in name.rsplit(".", 1)[1].split("x"))
        padded = (height + -height % 7, width + -width % 7)
        got = shift_mask(*padded, 7, 3, torch.device("cpu"))
        assert torch.equal(got != 0, stored(name).reshape(got.shape).bool()), name


@needs_golden
def test_position_index_and_merging_are_mmdetections() -> None:
    model = detector()
    index = model.backbone.layers[0].blocks[0].attn.relative_position_index  # type: ignore[union-attr, index]
    assert torch.equal(index, stored("swin.relative_position_index"))
    merge = model.backbone.layers[0].downsample
    seen = []
    merge.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))  # type: ignore[union-attr]
    x = stored("swin.merge.in_3x5x2").reshape(1, 3, 5, 2)
    merge(torch.cat([x] * 4, dim=3))  # type: ignore[operator, misc]
    expected = stored("swin.merge.cat_2x3x8").reshape(1, 2, 3, 4, 1, 2).expand(-1, -1, -1, -1, 4, -1)
    torch.testing.assert_close(seen[0], expected.reshape(1, 2, 3, 32))


def test_padded_tokens_take_part_in_attention() -> None:
    """Keys of the zeros that fill a window are the bias of qkv: they must change what the real tokens get."""
    block = detector().backbone.layers[0].blocks[0]  # type: ignore[union-attr, index]
    x = torch.rand(1, 5, 5, 8)
    whole = block.attend(x)  # type: ignore[union-attr, operator]
    block.attn.qkv.bias += 1.0  # type: ignore[union-attr]
    assert not torch.allclose(block.attend(x), whole)  # type: ignore[union-attr, operator]
    assert whole.shape == x.shape


@pytest.mark.parametrize("size", [(64, 64), (61, 90), (33, 47)])
def test_backbone_takes_any_size(size: tuple[int, int]) -> None:
    backbone = Swin(detector().config)
    maps = backbone(torch.rand(1, 3, *size))
    for map_, stride in zip(maps, STRIDES, strict=False):
        assert map_.shape[2:] == tuple(-(-side // stride) for side in size)
    assert coarsest(maps[-1]).shape[2] == -(-maps[-1].shape[2] // 2)
