"""Pages that are files from elsewhere in the repository, with their links as the site has them."""

import posixpath
import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
WHOLE = re.compile(r'--8<-- "([\w./]+)"\s*')
LINK = re.compile(r"\]\(([\w./-]+\.md)(#[\w-]+)?\)")
PAGES = {  # file of the repository -> the page that is nothing but it
    match[1]: page.name
    for page in sorted(DOCS.glob("*.md"))
    if (match := WHOLE.fullmatch(page.read_text(encoding="utf-8")))
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs with every page's source."""
    match = WHOLE.fullmatch(markdown)
    return markdown if match is None else _moved((ROOT / match[1]).read_text(encoding="utf-8"), match[1])


def _moved(text: str, file: str) -> str:
    """The text of a file, its links to other such files leading to their pages."""

    def page(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(file), link[1]))
        return f"]({PAGES.get(target, link[1])}{link[2] or ''})"

    return LINK.sub(page, text)
