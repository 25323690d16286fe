"""What the adapters of transformers ask of a model."""

import tomllib
from pathlib import Path

import pytest
from torch import nn

from aphq.errors import ModelError
from aphq.models.hf.base import OLDEST_RELEASE, require_parts

transformers = pytest.importorskip("transformers")


def test_the_layout_of_another_release_is_refused_with_the_releases_that_fit() -> None:
    rearranged = nn.ModuleDict({"attention": nn.ModuleDict({"query": nn.Linear(2, 2)})})
    with pytest.raises(ModelError) as refused:
        require_parts(rearranged, "encoder.layer.0", "attention.query", "attention.q_proj")
    for told in ("encoder.layer.0", "attention.q_proj", OLDEST_RELEASE, transformers.__version__):
        assert told in str(refused.value)


def test_the_oldest_release_is_the_one_that_is_installed_with_the_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert project["project"]["optional-dependencies"]["hf"] == [f"transformers>={OLDEST_RELEASE}"]
