"""The fenced blocks of README and docs/, and the commands in them."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
MARK = re.compile(r"<!-- not run: (?P<reason>.+) -->")
INCLUDE = re.compile(r'--8<-- "(?P<file>[^:"]+)')


@dataclass(frozen=True)
class Block:
    """One fenced block; `reason` says why it is not run, if it is not."""

    page: str
    line: int
    language: str
    text: str
    reason: str = ""

    @property
    def included(self) -> str | None:
        """The file that the block shows instead of text of its own."""
        found = INCLUDE.match(self.text)
        return found["file"] if found else None

    @property
    def commands(self) -> list[list[str]]:
        """The words of every command, continued lines joined, comments gone."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        mark = MARK.fullmatch(lines[start - 1]) if start else None
        text = "\n".join(lines[start + 1 : number])
        language = lines[start].removeprefix("```")
        yield Block(page.name, start + 1, language, text, mark["reason"] if mark else "")
        start = None


EVERY = [block for page in PAGES for block in blocks(page)]
