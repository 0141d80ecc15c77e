"""Texts as HTML: always escaped, back-ticks as code, addresses as links.

>>> print(prose("`x < 1` and a lone `"))
<code>x &lt; 1</code> and a lone `
>>> print(linked("see https://example.org/a"))
see <a href='https://example.org/a' rel='noreferrer'>https://example.org/a</a>
"""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape

from markupsafe import Markup

# One line only: a fence, or a back-tick that has no fellow, is left as it is.
_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+)\1(?!`)")


def prose(text: str) -> Markup:
    """Return the text, with what stands in back-ticks as code."""
    return Markup(_marked(text, escape))


def linked(text: str) -> Markup:
    """Return the same with bare addresses as links; nothing is fetched unless one is followed."""
    return Markup(_marked(text, lambda plain: " ".join(map(_link, plain.split(" ")))))


def _marked(text: str, plain: Callable[[str], str]) -> str:
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [plain(text[end : found.start()]), f"<code>{escape(found[2])}</code>"]
        end = found.end()
    return "".join([*parts, plain(text[end:])])


def _link(word: str) -> str:
    if not word.startswith("https://"):
        return escape(word)
    address = word.rstrip(".,;)")
    rest = word.removeprefix(address)
    return f"<a href='{escape(address)}' rel='noreferrer'>{escape(address)}</a>{escape(rest)}"
