"""The site builds, and no link in it leads nowhere."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material")


def build(place: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # not --quiet: what is not said is not counted either, and strict means nothing
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    return subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=120, check=False)


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path / "site")
    assert done.returncode == 0, done.stdout + done.stderr
    how = (tmp_path / "site" / "how" / "index.html").read_text()
    assert "<math" in how
    assert "\\mathcal" not in how, "a formula was left as TeX"
    results = (tmp_path / "site" / "results" / "index.html").read_text()
    assert "reconstruct" in results, "results/README.md is included"
    assert 'href="../results_deploy/#latency"' in results, "not the page that is called deploy on the site"
    own = (tmp_path / "site" / "own_model" / "index.html").read_text()
    assert "MyOpenAttention" in own, "the example's code is included"
    for page in (tmp_path / "site").rglob("*.html"):
        assert "https://fonts." not in page.read_text(), "the site needs no network"


def test_a_link_that_leads_nowhere_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[somewhere](index.md#gone)")
    settings = (ROOT / "mkdocs.yml").read_text()
    validation = settings[settings.index("validation:") :]
    (tmp_path / "mkdocs.yml").write_text(f"site_name: x\nstrict: true\n{validation}")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert "'index.md#gone'" in done.stdout + done.stderr
