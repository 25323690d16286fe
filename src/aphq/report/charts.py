"""Charts as inline SVG: no script, colours from the page's style sheet, a title and a description for those who listen.

Every function takes numbers and labels and gives markup; text is escaped here.
"""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

LEFT, RIGHT, TOP, BOTTOM = 52, 12, 12, 40
WIDE = (960, 280)
ALONE = 2  # the colour of a line that is compared with nothing
HEAT = (222, 92, 20)  # stands out on white and on black
WIDE_RATIO = 30  # above it a small chart is logarithmic
TINY = 1e-30  # nothing smaller is drawn
Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """Values with a name; None leaves a gap."""

    name: str
    values: Numbers


@dataclass(frozen=True)
class Scale:
    """From values to pixels, linear or logarithmic."""

    lower: float
    upper: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        at = self._inner(value)
        low, high = self._inner(self.lower), self._inner(self.upper)
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def _inner(self, value: float) -> float:
        return math.log10(max(value, self.lower)) if self.log else value

    @classmethod
    def over(cls, values: Iterable[float], start: float, end: float, log: bool = False) -> Scale:
        """Around all values, with some air."""
        finite = [v for v in values if math.isfinite(v) and (v > TINY or not log)]
        lower, upper = (min(finite), max(finite)) if finite else (0.1, 1.0)
        if log:
            return cls(lower / 1.2, max(upper * 1.2, lower * 10), start, end, log)
        size = max(abs(lower), abs(upper))
        apart = upper - lower > max(TINY, 1e-9 * size)
        air = 0.05 * (upper - lower) if apart else 0.1 * max(size, 1.0)
        return cls(lower - air, upper + air, start, end)

    def ticks(self, about: int = 5) -> list[float]:
        if self.log:
            first, last = math.ceil(math.log10(self.lower)), math.floor(math.log10(self.upper))
            step = max(1, (last - first) // about)
            return [10.0**power for power in range(first, last + 1, step)]
        rough = (self.upper - self.lower) / about
        power = 10 ** math.floor(math.log10(rough))
        step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
        count = math.floor((self.upper - self.lower) / step) + 1
        marks = [math.ceil(self.lower / step) * step + i * step for i in range(count)]
        return [round(mark, 12) for mark in marks if mark <= self.upper]


@dataclass
class Drawing:
    """An SVG in the making."""

    title: str
    width: int
    height: int
    kind: str = ""  # a further class for the style sheet
    parts: list[str] = field(default_factory=list)

    def add(self, part: str) -> None:
        self.parts.append(part)

    def text(self, x: float, y: float, words: object, anchor: str = "middle", kind: str = "") -> None:
        self.add(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>')

    def line(self, x1: float, y1: float, x2: float, y2: float, kind: str) -> None:
        self.add(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>')

    def path(self, points: Sequence[tuple[float, float] | None], kind: str) -> None:
        commands, pen = [], "M"
        for point in points:
            if point is None:
                pen = "M"
                continue
            commands.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
            pen = "L"
        self.add(f'<path d="{"".join(commands)}" class="{kind}"/>')

    def y_axis(self, scale: Scale, label: str, ticks: int = 5) -> None:
        for tick in scale.ticks(ticks):
            y = scale(tick)
            self.line(LEFT, y, self.width - RIGHT, y, "grid")
            self.text(LEFT - 6, y + 4, number(tick), "end")
        self.add(
            f'<text transform="translate(12 {(self.height - BOTTOM + TOP) / 2:.0f}) rotate(-90)" '
            f'text-anchor="middle">{escape(label)}</text>'
        )

    def x_axis(self, scale: Scale, label: str, names: Sequence[str] = ()) -> None:
        base = self.height - BOTTOM
        self.line(LEFT, base, self.width - RIGHT, base, "axis")
        if names:
            every = math.ceil(len(names) * 26 / (self.width - LEFT - RIGHT)) if len(names) > 1 else 1
            marks: list[tuple[float, str]] = [(i, name) for i, name in enumerate(names) if i % every == 0]
        else:
            marks = [(tick, number(tick)) for tick in scale.ticks(6 if self.width > 400 else 3)]
        for at, name in marks:
            self.text(scale(at), base + 15, name)
        self.text((LEFT + self.width - RIGHT) / 2, self.height - 6, label)

    def legend(self, names: Sequence[str]) -> Markup:
        items = "".join(f'<li><span class="key s{i % 8}"></span>{escape(n)}</li>' for i, n in enumerate(names))
        return Markup(f'<ul class="legend">{items}</ul>')

    def markup(self, legend: Sequence[str] = ()) -> Markup:
        keys = self.legend(legend) if len(legend) > 1 else Markup()
        svg = (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" class="{self.kind}" '
            f'style="--w:{self.width}px"><title>{escape(self.title)}</title>{"".join(self.parts)}</svg>'
        )
        return Markup(
            f'<div class="chart" role="group" tabindex="0" aria-label="{escape(self.title)}">{keys}{svg}</div>'
        )


def number(value: float) -> str:
    """Short and readable: 0.001, 1.5, 20 k."""
    if value != 0 and (abs(value) >= 1e6 or abs(value) < 1e-3):
        return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    if abs(value) >= 1e4:
        return f"{value / 1e3:g} k"
    return f"{value:.4g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    y_label: str,
    x_label: str,
    names: Sequence[str] = (),
    log: bool = False,
    size: tuple[int, int] = WIDE,
    dots: bool = True,
    spread_over: float | None = None,
) -> Markup:
    """Lines over positions 0, 1, ... that `names` label, or that are stretched over 0 ... `spread_over`."""
    draw = Drawing(title, *size)
    most = max((len(s.values) for s in series), default=1)
    unit = 1.0 if spread_over is None else spread_over / max(1, most - 1)
    x = Scale(-0.5 if names else 0, max(most - 0.5 if names else (most - 1) * unit, 1e-9), LEFT, size[0] - RIGHT)
    everything = (v for s in series for v in s.values if v is not None)
    y = Scale.over(everything, size[1] - BOTTOM, TOP, log)
    draw.y_axis(y, y_label)
    draw.x_axis(x, x_label, names)
    for i, s in enumerate(series, start=ALONE if len(series) == 1 else 0):
        points = [None if v is None else (x(j * unit), y(v)) for j, v in enumerate(s.values)]
        draw.path(points, f"line s{i % 8}")
        for j, point in enumerate(points if dots else ()):
            if point is not None:
                where = names[j] if names else str(j)
                draw.add(
                    f'<circle cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3" class="dot s{i % 8}">'
                    f"<title>{escape(s.name)}, {escape(where)}: {number(s.values[j] or 0.0)}</title></circle>"
                )
    return draw.markup([s.name for s in series])


def spark(title: str, series: Sequence[Series], *, size: tuple[int, int] = (220, 90)) -> Markup:
    """A small line chart without axes, for many side by side; its ends are told in words. Values of very different
    size are drawn on a logarithmic scale."""
    draw = Drawing(title, *size, kind="small")
    everything = [v for s in series for v in s.values if v is not None]
    log = min(everything, default=0) > 0 and max(everything) > WIDE_RATIO * min(everything)
    y = Scale.over(everything, size[1] - 6, 6, log)
    for i, s in enumerate(series, start=ALONE if len(series) == 1 else 0):
        x = Scale(0, max(1, len(s.values) - 1), 4, size[0] - 4)
        draw.path([None if v is None else (x(j), y(v)) for j, v in enumerate(s.values)], f"line thin s{i % 8}")
    return draw.markup()


Box = Sequence[float]  # smallest, 1 %, 25 %, 50 %, 75 %, 99 %, largest


def box_plot(
    title: str,
    names: Sequence[str],
    groups: Sequence[tuple[str, Sequence[Box | None]]],
    *,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = WIDE,
) -> Markup:
    """Boxes from the 25 % to the 75 % quantile, whiskers to 1 % and 99 %, dots at the extremes."""
    draw = Drawing(title, *size)
    x = Scale(-0.5, len(names) - 0.5, LEFT, size[0] - RIGHT)
    y = Scale.over((v for _, boxes in groups for box in boxes if box for v in box), size[1] - BOTTOM, TOP)
    draw.y_axis(y, y_label)
    draw.x_axis(x, x_label, names)
    slot = (size[0] - LEFT - RIGHT) / max(1, len(names)) / (len(groups) + 1)
    width = min(slot * 0.8, 16)
    for g, (group, boxes) in enumerate(groups):
        for j, box in enumerate(boxes):
            if box is None:
                continue
            middle = x(j) + (g - (len(groups) - 1) / 2) * slot
            low, q1, q25, q50, q75, q99, high = (y(v) for v in box)
            words = f"{group}, {names[j]}: from {number(box[0])} to {number(box[-1])}, half of it between "
            words += f"{number(box[2])} and {number(box[4])}"
            draw.add(f'<g class="box s{g % 8}"><title>{escape(words)}</title>')
            draw.line(middle, q1, middle, q99, "whisker")
            draw.add(
                f'<rect x="{middle - width / 2:.1f}" y="{q75:.1f}" width="{width:.1f}" '
                f'height="{max(1.0, q25 - q75):.1f}"/>'
            )
            draw.line(middle - width / 2, q50, middle + width / 2, q50, "median")
            for end in (low, high):
                draw.add(f'<circle cx="{middle:.1f}" cy="{end:.1f}" r="2"/>')
            draw.add("</g>")
    return draw.markup([group for group, _ in groups])


def histogram(
    title: str,
    lower: float,
    upper: float,
    series: Sequence[Series],
    *,
    x_label: str,
    size: tuple[int, int] = (480, 250),
) -> Markup:
    """Shares per bin on a logarithmic scale, because the tails are what quantization stumbles over."""
    draw = Drawing(title, *size)
    x = Scale(lower, upper if upper > lower else lower + 1, LEFT, size[0] - RIGHT)
    y = Scale.over((v for s in series for v in s.values if v), size[1] - BOTTOM, TOP, log=True)
    draw.y_axis(y, "share of the values", 4)
    draw.x_axis(x, x_label)
    base = float(size[1] - BOTTOM)
    for i, s in enumerate(series):
        width = (x.upper - x.lower) / max(1, len(s.values))
        points: list[tuple[float, float] | None] = [(x(x.lower), base)]
        for j, share in enumerate(s.values):
            top = y(share) if share else base
            points += [(x(x.lower + j * width), top), (x(x.lower + (j + 1) * width), top)]
        draw.path([*points, (x(x.upper), base)], f"area s{i % 8}")
    return draw.markup([s.name for s in series])


def scatter(
    title: str,
    points: Sequence[tuple[str, float, float]],
    *,
    x_label: str,
    y_label: str,
    size: tuple[int, int] = (460, 300),
) -> Markup:
    """Named points."""
    draw = Drawing(title, *size)
    x = Scale.over((p[1] for p in points), LEFT, size[0] - RIGHT)
    y = Scale.over((p[2] for p in points), size[1] - BOTTOM, TOP)
    draw.y_axis(y, y_label)
    draw.x_axis(x, x_label)
    for i, (name, across, up) in enumerate(points):
        words = f"{name}: {number(across)}, {number(up)}"
        at = x(across), y(up)
        draw.add(
            f'<circle cx="{at[0]:.1f}" cy="{at[1]:.1f}" r="6" class="dot s{i % 8}">'
            f"<title>{escape(words)}</title></circle>"
        )
        left = at[0] > size[0] * 0.6
        draw.text(at[0] + (-10 if left else 10), at[1] + 4, name, "end" if left else "start")
    return draw.markup()


def heat_map(title: str, rows: Sequence[Sequence[float]], *, kind: str = "map") -> Markup:
    """Values as an image: the more, the stronger the colour. Transparent, so that it fits light and dark pages."""
    from PIL import Image

    height, width = len(rows), len(rows[0])
    flat = sorted(v for row in rows for v in row)
    top = flat[min(len(flat) - 1, int(0.99 * len(flat)))] or 1.0  # a single outlier would leave the rest blank
    image = Image.new("RGBA", (width, height))
    image.putdata([(*HEAT, round(255 * min(1.0, v / top))) for row in rows for v in row])
    buffer = io.BytesIO()
    image.save(buffer, "PNG", optimize=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return Markup(
        f'<img class="heat {escape(kind)}" alt="{escape(title)}" width="{width}" height="{height}" '
        f'src="data:image/png;base64,{data}">'
    )
