import base64
import io
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from aphq.report.charts import TINY, Scale, Series, box_plot, heat_map, histogram, line_chart, number, scatter, spark

NASTY = '<script>alert("x")</script>&'


def svg(markup: str) -> ElementTree.Element:
    """The chart, parsed: it must be well-formed."""
    found = re.search(r"<svg.*</svg>", markup, re.S)
    assert found is not None
    return ElementTree.fromstring(found[0])


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.booleans())
def test_scales_hold_their_values_and_ticks(values: list[float], log: bool) -> None:
    scale = Scale.over(values, 200, 10, log=log)
    inside = [v for v in values if v > TINY or not log]
    assert all(10 - 1e-6 <= scale(v) <= 200 + 1e-6 for v in inside)
    assert all(10 - 1e-6 <= scale(tick) <= 200 + 1e-6 for tick in scale.ticks())
    assert len(scale.ticks()) <= 12


def test_lines_have_a_title_a_legend_and_gaps() -> None:
    chart = line_chart(NASTY, [Series("a", [1, None, 3, 4]), Series(NASTY, [2, 2, 2, 2])], y_label="y", x_label="x")
    root = svg(chart)
    assert root.find("title").text == NASTY  # type: ignore[union-attr]
    assert root.attrib["role"] == "img"
    paths = [p.attrib["d"] for p in root.iter("path")]
    assert [path.count("M") for path in paths] == [2, 1]
    assert "<script>" not in chart
    assert chart.count("<li>") == 2


def test_boxes_are_drawn_where_there_is_something() -> None:
    box = [-4, -2, -1, 0, 1, 2, 4]
    root = svg(box_plot("t", ["0", "1"], [("a", [box, None]), ("b", [box, box])], x_label="x", y_label="y"))
    assert len(list(root.iter("rect"))) == 3
    assert "from -4 to 4" in "".join(root.itertext())


def test_histograms_leave_empty_bins_at_the_ground() -> None:
    root = svg(histogram("t", 0, 2, [Series("a", [0.5, 0.0, 0.5])], x_label="x"))
    (path,) = [p.attrib["d"] for p in root.iter("path")]
    assert len(re.findall("[ML]", path)) == 2 + 2 * 3


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [5.0] * 3])
def test_constants_and_single_values_can_be_drawn(values: list[float]) -> None:
    svg(line_chart("t", [Series("a", values)], y_label="y", x_label="x"))
    svg(spark("t", [Series("a", values)]))
    svg(scatter("t", [("a", v, v) for v in values], x_label="x", y_label="y"))
    svg(histogram("t", 1, 1, [Series("a", values)], x_label="x"))


def test_a_heat_map_is_an_image_of_its_values() -> None:
    chart = heat_map("map", [[0.0, 1.0], [0.5, 0.25]])
    data = re.search(r"base64,([^\"]+)", chart)
    assert data is not None
    image = Image.open(io.BytesIO(base64.b64decode(data[1])))
    assert image.size == (2, 2)
    assert list(image.getchannel("A").tobytes()) == [0, 255, 128, 64]
    assert 'alt="map"' in chart


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (20_000, "20 k"), (1e-5, "1e-5"), (3e7, "3e7"), (-2, "-2")]
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert number(value) == text
