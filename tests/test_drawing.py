import torch
from PIL import Image

from aphq.drawing import BAR, GAP, colour_of, drawn, side_by_side
from aphq.models.detection import Detections


def test_masks_are_tinted_and_boxes_outlined() -> None:
    masks = torch.zeros(1, 40, 60, dtype=torch.bool)
    masks[0, 20:35, 30:50] = True
    found = Detections(torch.tensor([[28.0, 2.0, 55.0, 38.0]]), torch.tensor([0.9]), torch.tensor([1]), masks)
    image = Image.new("RGB", (60, 40), (10, 10, 10))
    out = drawn(image, found, ("cat", "dog"), "float")
    assert out.size == (60, 40 + BAR)
    assert out.getpixel((28, 30 + BAR)) == colour_of(1)
    tinted, plain = out.getpixel((40, 25 + BAR)), out.getpixel((5, 25 + BAR))
    assert plain == (10, 10, 10)
    assert tinted != plain
    assert image.getpixel((40, 25)) == (10, 10, 10), "the image itself stays as it was"


def test_nothing_found_is_the_image_itself() -> None:
    nothing = Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0).long(), torch.zeros(0, 40, 60).bool())
    out = drawn(Image.new("RGB", (60, 40), "red"), nothing, (), "float")
    assert out.crop((0, BAR, 60, 40 + BAR)).getcolors() == [(2400, (255, 0, 0))]


def test_panels_stand_side_by_side() -> None:
    panels = [Image.new("RGB", (20, 30), "red"), Image.new("RGB", (25, 10), "blue")]
    out = side_by_side(panels)
    assert out.size == (45 + GAP, 30)
    assert out.getpixel((20 + GAP, 0)) == (0, 0, 255)


def test_neighbouring_labels_differ_in_colour() -> None:
    assert len({colour_of(label) for label in range(80)}) == 80
