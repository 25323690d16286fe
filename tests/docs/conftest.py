import shutil
from pathlib import Path

import pytest

from . import world


@pytest.fixture(scope="session")
def furnished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, weights and a finished run, made once."""
    folder = tmp_path_factory.mktemp("docs") / "world"
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        world.shrink(patch)
        world.furnish(folder)
        world.finished_run(folder)
    return folder


@pytest.fixture
def place(furnished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory of one's own, in a world where models are small."""
    shutil.copytree(furnished, tmp_path / "here", symlinks=True)
    world.shrink(monkeypatch)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here" / "examples"))
    return tmp_path / "here"
