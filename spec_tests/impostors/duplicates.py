"""Near-duplicates among the near-misses: two that are written alike and seen alike.

    python -m spec_tests.impostors.duplicates

Written alike: the same clauses must reject them in the same ways, and what they bring besides the
bases of their chapter is the same text but for names and one token in ten. What a near-miss brings
is the source of what its card's function reaches: what it closes over, and what of its own module
that names. Seen alike: those clauses find the same in the same case, numbers aside.

The first needs no ranks and leaves a handful of pairs for the second. Two that are seen alike and
written differently both stay: clauses observe little, and it is the writing that is repeated.
"""

from __future__ import annotations

import difflib
import inspect
import io
import itertools
import os
import re
import tokenize
import types
from collections.abc import Iterator
from typing import Any

from spec_tests.impostors import CATALOGUE
from spec_tests.impostors.card import Impostor
from spec_tests.impostors.crew import Crew, Job

ALIKE = 0.9
"""Of two texts in tokens: twice what they share over what they have."""

_DULL = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


def written_alike() -> list[tuple[str, str, float]]:
    """Pairs of near-misses, and how much they are alike."""
    groups: dict[Any, list[Impostor]] = {}
    for card in CATALOGUE.values():
        if not card.is_benign:
            seen = (frozenset(card.rejected_by), frozenset(card.outcomes))
            groups.setdefault(seen, []).append(card)
    found = []
    for group in groups.values():
        texts = {card.id: tokens_of(card) for card in group}
        for one, other in itertools.combinations(texts, 2):
            ratio = likeness(texts[one], texts[other])
            if ratio >= ALIKE:
                found.append((one, other, ratio))
    return sorted(found)


def likeness(one: list[str], other: list[str]) -> float:
    """Between 0, nothing in common, and 1, the same."""
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio()


def tokens_of(card: Impostor) -> list[str]:
    """What the near-miss changes, in tokens."""
    tokens = [
        word for patch in card.patches for word in re.findall(r"\w+|[^\w\s]", " ".join(patch))
    ]
    for text in dict.fromkeys(_texts(card.functions, set())):
        tokens += split(text)
    return tokens


def _texts(thing: Any, visited: set[int]) -> Iterator[str]:
    """Sources and values of all that `thing` reaches in files of near-misses."""
    if id(thing) in visited:
        return
    visited.add(id(thing))
    if isinstance(thing, types.FunctionType):
        yield from _of_function(thing, visited)
    elif inspect.isclass(thing):
        yield from _of_class(thing, visited) if _is_own(thing) else ()
    elif not callable(thing):
        yield repr(thing)


def _of_function(thing: types.FunctionType, visited: set[int]) -> Iterator[str]:
    if thing.__name__ != "<lambda>":
        yield inspect.getsource(thing)
    elif _is_own(thing):
        yield repr([const for const in thing.__code__.co_consts if const is not None])
    for cell in thing.__closure__ or ():
        yield from _texts(cell.cell_contents, visited)
    yield from _named(thing.__code__, thing.__globals__, visited)


def _of_class(thing: type, visited: set[int]) -> Iterator[str]:
    yield inspect.getsource(thing)
    for parent in thing.__mro__[1:]:
        yield from _texts(parent, visited)
    for member in vars(thing).values():
        function = getattr(member, "__func__", member)
        function = inspect.unwrap(function) if callable(function) else function
        if isinstance(function, types.FunctionType) and _is_own(function):
            yield from _named(function.__code__, function.__globals__, visited)


def _named(code: types.CodeType, names: dict[str, Any], visited: set[int]) -> Iterator[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    for each in (code, *inner):
        for name in each.co_names:
            found = names.get(name)
            if (inspect.isclass(found) or isinstance(found, types.FunctionType)) and _is_own(found):
                yield from _texts(found, visited)


def _is_own(thing: Any) -> bool:
    """Whether it stands in a file of near-misses, and not in the bases that they share."""
    module = getattr(thing, "__module__", "") or ""
    place, _, file = module.rpartition(".")
    return place == "spec_tests.impostors" and not file.startswith(("plain_", "card"))


def split(text: str) -> list[str]:
    """Tokens without comments, docstrings and layout; without the names that are defined."""
    try:
        tokens = [*tokenize.generate_tokens(io.StringIO(inspect.cleandoc(text)).readline)]
    except (tokenize.TokenError, IndentationError):
        return text.split()
    kept = [t for t in tokens if t.type not in _DULL and not t.string.startswith('"""')]
    words = [token.string for token in kept]
    before = ["", *words]
    return [w for w, last in zip(words, before, strict=False) if last not in ("class", "def")]


def main() -> int:
    """Print the pairs, those that are seen alike as well as near-duplicates; 1 if there are any."""
    found = written_alike()
    cards = {card for one, other, _ in found for card in (one, other)}
    with Crew(min(os.cpu_count() or 1, len(cards) or 1)) as crew:
        asked = {card: crew.submit(Job(card, repeat=1)) for card in sorted(cards)}
        seen = {card: future.result().observations for card, future in asked.items()}
    count = 0
    for one, other, ratio in found:
        count += seen[one] == seen[other]
        print(f"{ratio:.2f}  {one}  {other}" + "  NEAR-DUPLICATES" * (seen[one] == seen[other]))
    print(f"{len(found)} pairs are written alike, {count} of them are seen alike")
    return 1 if count else 0


if __name__ == "__main__":
    raise SystemExit(main())
