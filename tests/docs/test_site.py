"""The site builds, and no link in it leads nowhere."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from .blocks import ROOT

pytestmark = pytest.mark.skipif(importlib.util.find_spec("material") is None, reason="needs mkdocs-material")


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    how = (tmp_path / "site" / "how" / "index.html").read_text()
    assert "<math" in how
    assert "\\mathcal" not in how, "a formula was left as TeX"
    assert "reconstruct" in (tmp_path / "site" / "results" / "index.html").read_text(), "results/README.md is included"
    own = (tmp_path / "site" / "own_model" / "index.html").read_text()
    assert "MyOpenAttention" in own, "the example's code is included"
    for page in (tmp_path / "site").rglob("*.html"):
        assert "https://fonts." not in page.read_text(), "the site needs no network"
