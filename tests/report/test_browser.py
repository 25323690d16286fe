"""Reports in a real browser, if there is one: a frame as wide as a screen, measured from outside."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from aphq.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
WIDTHS = (1280, 390)
FRAMES = """<!doctype html><body>{frames}<script>
const seen = frame => {{
  const page = frame.contentDocument, root = page.documentElement;
  const empty = [...page.querySelectorAll("svg")].filter(s => s.checkVisibility() && !s.getBoundingClientRect().height);
  return {{
    overflow: root.scrollWidth - root.clientWidth,
    wide: root.scrollWidth > root.clientWidth ? [...page.querySelectorAll("main *, header *")].filter(
      e => e.getBoundingClientRect().right > root.clientWidth + 1 && !e.closest(".chart *, .scroll *, pre *")
    ).map(e => e.outerHTML.slice(0, 80)) : [],
    charts: page.querySelectorAll("svg").length,
    images: [...page.images].filter(i => i.naturalWidth > 0).length,
    empty: empty.length,
    unnamed: [...page.querySelectorAll("[tabindex]")].filter(
      e => !e.getAttribute("aria-label") && e.tagName != "PRE").length,
    text: getComputedStyle(page.body).color,
  }};
}};
onload = () => {{
  const found = [...document.querySelectorAll("iframe")].map(seen);
  document.body.innerHTML = "<pre>" + JSON.stringify(found) + "</pre>";
}};
</script>"""


def looked_at(pages: list[Path], tmp_path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What each page is like at each width, and what was written to the console."""
    frames = "".join(
        f'<iframe width="{width}" height="900" src="{page.as_uri()}"></iframe>' for page in pages for width in WIDTHS
    )
    wrapper = tmp_path / "frames.html"
    wrapper.write_text(FRAMES.format(frames=frames))
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    command = [str(CHROMIUM), *options, profile, "--enable-logging=stderr", wrapper.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    found = re.search(r"<pre>(.*)</pre>", done.stdout)
    assert found is not None, done.stderr[-2000:]
    return json.loads(found[1]), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def test_pages_open_without_errors_at_desktop_and_phone_width(runs: dict[str, Path], tmp_path: Path) -> None:
    both = write_report([runs["labelled"], runs["plain"]], tmp_path / "both.html")
    pages = [runs["labelled"] / "report.html", runs["swin"] / "report.html", both]
    found, console = looked_at(pages, tmp_path)
    assert console == []
    assert len(found) == len(pages) * len(WIDTHS)
    for page in found:
        assert page["overflow"] <= 0, f"nothing sticks out to the right: {page['wide']}"
        assert page["charts"] >= 6
        assert page["empty"] == 0
        assert page["unnamed"] == 0, "what takes the keyboard has a name"
    assert all(page["images"] >= 3 for page in found[:4]), "the maps are there"
