"""Formulas as MathML, which browsers draw by themselves: no script, no network."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

FORMULA = re.compile(r'<(?:div|span) class="arithmatex">\\([\[(])(.*?)\\[\])]</(?:div|span)>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Called by mkdocs with every page's HTML."""
    return FORMULA.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    block = match[1] == "["
    return convert(html.unescape(match[2]).strip(), display="block" if block else "inline")
