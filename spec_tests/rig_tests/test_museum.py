"""The museum is what the cards say, and each card says what a visitor wants to know."""

import re

import pytest

from spec_tests import impostors, ledger
from spec_tests.impostors import duplicates, museum

NEAR_MISSES = [card for card in impostors.CATALOGUE.values() if not card.is_benign]


def test_the_page_is_fresh():
    text = museum.render(ledger.load_all())
    assert museum.PATH.read_text() == text, "run `python -m spec_tests ledger`"


def test_every_near_miss_says_what_it_does_where_it_comes_from_and_why_it_is_unseen():
    for card in NEAR_MISSES:
        assert card.does.endswith("."), card.id
        assert card.seen or card is impostors.FORCED_FAILURE, card.id
        assert card.functions or card.patches, card.id
    unseen = [card.id for card in NEAR_MISSES if not card.unseen]
    assert unseen == [impostors.FORCED_FAILURE.id], "a control is nobody's bug"


def test_right_but_unusual_code_of_each_kind_is_among_the_benign():
    owed = {
        "benign.after-backward",  # one flat all-reduce after backward
        "benign.reduce-then-divide",
        "benign.plain",  # divides, then reduces
        "benign.zero1-plain",  # a parameter to each rank
        "benign.zero1-elementwise",
        "benign.fsdp-piecemeal",  # without fused gathers
    }
    assert owed <= {card.id for card in impostors.CATALOGUE.values() if card.is_benign}


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        ("pytorch issue 69031.", ["pytorch/pytorch/issues/69031"]),
        (
            "fixed by pytorch issues 69031 and 42793",
            ["pytorch/pytorch/issues/69031", "pytorch/pytorch/issues/42793"],
        ),
        ("llm.c pull request 828: a cast", ["karpathy/llm.c/issues/828"]),
        ("my-notes issue 3, and step 7", []),
    ],
)
def test_threads_of_known_projects_are_linked_and_no_others(words: str, numbers: list[str]):
    text = museum.linked(words)
    assert re.findall(r"\(https://github.com/([^)]*)\)", text) == numbers
    assert re.sub(r"\[(\d+)\]\([^)]*\)", r"\1", text) == words, "nothing else is changed"


def test_a_copy_is_written_alike_and_other_words_are_not():
    body = "    def scale(self, flat):\n        return flat / self.size()"
    copy = f"class Second(Base):\n{body}  # a comment more\n"
    other = "class Third(Base):\n    def finish(self):\n        self.handles[0].wait()\n"
    first = duplicates.split(f"class First(Base):\n{body}\n")
    assert "First" not in first
    assert "scale" not in first
    assert duplicates.likeness(first, duplicates.split(copy)) == 1.0
    assert duplicates.likeness(first, duplicates.split(other)) < duplicates.ALIKE


def test_what_a_card_brings_is_found_behind_its_function():
    sums = duplicates.tokens_of(impostors.find("ddp.sum-for-mean"))
    assert {"class", "PlainDdp", "clone"} <= {*sums}
    patched = duplicates.tokens_of(impostors.find("training.patched-own-loss"))
    assert {"loss_sum", "total", "solution"} <= {*patched}
