"""Near-duplicates among the near-misses: two that are written alike and seen alike.

    python -m spec_tests.museum.duplicates

Written alike: the same clauses must reject them in the same ways, and what they bring besides the
bases of their chapter is the same text but for names and one token in ten. What a near-miss brings
is its difference, or the source of its class and of those that it inherits in files of near-misses.
Seen alike: those clauses find the same in the same case, numbers aside.

The first needs no ranks and leaves a handful of pairs for the second. Two that are seen alike and
written differently both stay: clauses observe little, and it is the writing that is repeated.
"""

from __future__ import annotations

import argparse
import difflib
import inspect
import io
import itertools
import os
import re
import tokenize
from typing import Any

from spec_tests.museum import CATALOGUE
from spec_tests.museum.card import Impostor
from spec_tests.museum.crew import Crew, Job

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
    if card.patches:
        return [token for _, *lines in card.patches for token in _changed(*lines)]
    own = [each for each in getattr(card.code, "__mro__", ()) if _is_own(each)]
    return [token for each in own for token in split(_source(each))]


def _changed(before: str, after: str) -> list[str]:
    """The tokens that go and those that come, in their order."""
    goes, comes = (re.findall(r"\w+|[^\w\s]", text) for text in (before, after))
    steps = difflib.SequenceMatcher(None, goes, comes, autojunk=False).get_opcodes()
    of = [(*goes[a:b], *comes[c:d]) for kind, a, b, c, d in steps if kind != "equal"]
    return [*itertools.chain(*of)]


def _is_own(kind: type) -> bool:
    """Whether it is in a file of near-misses, and not among the bases that they share."""
    return kind.__module__.startswith("spec_tests.museum.catalogue.")


def _source(kind: type) -> str:
    """The text without the decorators, which are the card's."""
    text = inspect.getsource(kind)
    return text[text.index("class ") :]


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
    argparse.ArgumentParser(
        prog="python -m spec_tests.museum.duplicates", description=__doc__.partition("\n")[0]
    ).parse_args()
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
