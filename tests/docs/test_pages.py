"""Every fenced block of README and docs/ does what it says, in order, page by page."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from aphq.errors import RecipeError
from aphq.recipe import Recipe

from .blocks import EVERY, PAGES, Block
from .world import RUNNERS, furnish_for_detectors, run_block

RUN = [block for block in EVERY if not block.reason and not block.included]
NOT_RUN = {  # page -> what its blocks that cannot run start with
    "README.md": ["make demo", "pip install", "pip install", "pip install"],
    "CONTRIBUTING.md": ["make install"],
    "index.md": ["make demo", "pip install"],
    "deploy.md": ["pip install"],
}
DETECTION = re.compile(r"mask_rcnn|runs/mask")
RUN_FOLDER = re.compile(r"runs/\w+")
MADE_BY = re.compile(r'(?:--out |out=")(runs/\w+)')


def test_only_what_installs_or_builds_is_not_run() -> None:
    found: dict[str, list[str]] = {}
    for block in EVERY:
        if block.reason:
            found.setdefault(block.page, []).append(" ".join(block.commands[0][:2]))
    assert found == NOT_RUN
    for block in EVERY:
        for words in block.commands if block.reason else ():
            assert words[0] in ("make", "pip"), f"{block.page}, line {block.line}: {words[0]} can be run"


@pytest.mark.parametrize("block", EVERY, ids=lambda b: f"{b.page}-{b.line}")
def test_every_block_says_what_it_is(block: Block) -> None:
    assert block.language in RUNNERS, "sh, python or yaml; a block without a language is run by nobody"


def test_files_shown_in_pages_are_run() -> None:
    commands = [words for block in RUN if block.language == "sh" for words in block.commands]
    for shown in {block.included for block in EVERY if block.included}:
        assert any(words[:2] == ["python", shown] for words in commands), shown


@pytest.mark.parametrize("detection", [False, True], ids=["classifiers", "detectors"])
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_does_what_it_says(page: Path, detection: bool, place: Path, furnished: Path) -> None:
    todo = [block for block in RUN if block.page == page.name and bool(DETECTION.search(block.text)) == detection]
    if not todo:
        pytest.skip("nothing to run")
    if detection:
        furnish_for_detectors(place)
    for block in todo:
        for folder in sorted(set(RUN_FOLDER.findall(block.text)) - set(MADE_BY.findall(block.text))):
            if not (place / folder).exists() and not detection:  # made on another page
                shutil.copytree(furnished / "finished", place / folder)
        try:
            run_block(block)
        except Exception as problem:
            raise AssertionError(f"{block.page}, line {block.line}: {problem}") from problem
    sys.modules.pop("custom_model", None)  # its adapter is gone with this test's registry


def test_a_recipe_with_a_mistake_would_be_found() -> None:
    block = next(block for block in RUN if block.language == "yaml")
    with pytest.raises(RecipeError, match="overides"):
        Recipe.from_text(block.text.replace("overrides", "overides"))


def test_a_command_with_a_mistake_would_be_found(place: Path) -> None:
    with pytest.raises(AssertionError, match="--efort"):
        run_block(Block("x.md", 1, "sh", "aphq recipe show w4a4 --efort fast"))
    with pytest.raises(AssertionError, match="what is 'rm'"):
        run_block(Block("x.md", 1, "sh", "rm -rf runs"))
