import subprocess
import sys
from pathlib import Path

import pytest

from aphq.errors import RuntimeMissingError
from aphq.extras import installed, require
from aphq.models import architecture_named
from aphq.models.loading import load_model


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeMissingError, match=r"openvino .*pip install 'aphq\[openvino\]'"):
        require("openvino")


def test_the_package_works_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its adapters are imported when one of its models turns up, and then the extra is named."""
    code = "import sys, aphq.api, aphq.models; assert 'transformers' not in sys.modules, 'imported without need'"
    subprocess.run([sys.executable, "-c", code], check=True)
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(RuntimeMissingError, match=r"transformers .*pip install 'aphq\[hf\]'"):
        load_model(str(tmp_path))
    with pytest.raises(RuntimeMissingError, match=r"pip install 'aphq\[hf\]'"):
        architecture_named("transformers.ViT")


def test_what_is_there_is_there() -> None:
    assert installed("numpy")
    assert not installed("no_such_library")
