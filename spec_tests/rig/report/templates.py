"""Templates of pages and of texts, with the styles and filters that the pages share."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import escape
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

_FOLDER = Path(__file__).parent
# One line only: a fence, or a back-tick that has no fellow, is left as it is.
_CODE = re.compile(r"(?<!`)(`{1,2})(?!`)([^`\n]+)\1(?!`)")


def of_pages(folder: Path = _FOLDER) -> Environment:
    """Return the templates of HTML in a folder; they escape all but what a filter here returns."""
    loader = FileSystemLoader(folder)
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    found.filters |= {"prose": prose, "linked": linked}
    return found


def of_texts(folder: Path = _FOLDER) -> Environment:
    """Return the templates of plain text in a folder; a line that is a statement leaves no line."""
    return Environment(
        loader=FileSystemLoader(folder),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def unindented(name: str) -> str:
    """Return the text of a file beside the pages, such as a style, without what indents it."""
    return re.sub(r"\n\s+", "\n", (_FOLDER / name).read_text("utf-8"))


def prose(text: str) -> Markup:
    """Return the text as HTML, escaped, with what is in back-ticks as code.

    >>> print(prose("`x < 1` and a lone `"))
    <code>x &lt; 1</code> and a lone `
    """
    return Markup(_marked(text, _plain))


def linked(text: str) -> Markup:
    """Return the same with bare addresses as links; nothing is fetched unless one is followed.

    >>> print(linked("see https://example.org/a"))
    see <a href='https://example.org/a' rel='noreferrer'>https://example.org/a</a>
    """
    return Markup(_marked(text, lambda plain: " ".join(map(_link, plain.split(" ")))))


def _marked(text: str, plain: Callable[[str], str]) -> str:
    parts, end = [], 0
    for found in _CODE.finditer(text):
        parts += [plain(text[end : found.start()]), f"<code>{_plain(found[2])}</code>"]
        end = found.end()
    return "".join([*parts, plain(text[end:])])


def _plain(text: str) -> str:
    return escape(text, quote=False)  # it stands between tags, where a quote is only a quote


def _link(word: str) -> str:
    if not word.startswith("https://"):
        return _plain(word)
    address = word.rstrip(".,;)")
    rest = word.removeprefix(address)
    return f"<a href='{escape(address)}' rel='noreferrer'>{_plain(address)}</a>{_plain(rest)}"
