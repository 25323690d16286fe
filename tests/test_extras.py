import sys

import pytest

from aphq.errors import RuntimeMissingError
from aphq.extras import installed, require


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    with pytest.raises(RuntimeMissingError, match=r"openvino .*pip install 'aphq\[openvino\]'"):
        require("openvino")


def test_what_is_there_is_there() -> None:
    assert installed("numpy")
    assert not installed("no_such_library")
