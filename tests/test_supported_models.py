"""docs/models.md says what trying every model says."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("supported_models", ROOT / "scripts" / "supported_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def page(script: Any) -> str:
    text = script.TARGET.read_text(encoding="utf-8")
    if script.versions() not in text:
        pytest.skip("the page was made with other versions of the libraries")
    return str(text)


@pytest.mark.parametrize(
    ("section", "source"),
    [("timm", "cait"), ("timm", "swin_transformer"), ("torchvision", "vision_transformer"), ("transformers", "deit")],
)
def test_a_sample_is_up_to_date(script: Any, page: str, section: str, source: str) -> None:
    rows = script.rows_of(section, [source])
    assert any(row.supported for row in rows)
    for row in rows:
        assert row.text() in page


def test_what_has_no_adapter_is_not_listed_as_supported(script: Any, page: str) -> None:
    (row,) = script.rows_of("timm", ["convmixer"])
    assert row.refused.keys() == {script.NO_ADAPTER}
    assert not row.supported
    assert "convmixer," in page
    assert "| convmixer |" not in page


@pytest.mark.slow
def test_the_whole_page_is_up_to_date(script: Any, page: str) -> None:
    assert script.page() == page
