"""A near-miss is a class with its story in the docstring; a plain base teaches its algorithm."""

import ast
import importlib
import pkgutil
from pathlib import Path

import pytest

from spec_tests import plain
from spec_tests.contract import FUNCTIONS
from spec_tests.impostors import card
from spec_tests.target import Implementation


@pytest.fixture(autouse=True)
def catalogue(monkeypatch) -> dict[str, card.Impostor]:
    """An empty catalogue in the place of the real one."""
    empty: dict[str, card.Impostor] = {}
    monkeypatch.setattr(card, "CATALOGUE", empty)
    return empty


def test_a_decorated_class_is_a_card(catalogue):
    @card.near_miss("ddp.one", rejected_by=("ddp.a.b", "ddp.c.d"), outcomes=("hang",))
    class One(card.FreeStanding):
        """Does one thing that is
        wrong.

        From: a bug in
        some library.
        Unseen: nobody looks.

        A note.
        """

        @staticmethod
        def ddp(module):
            return module

    found = catalogue["ddp.one"]
    assert (found.does, found.seen) == ("Does one thing that is wrong.", "a bug in some library.")
    assert (found.unseen, found.outcomes) == ("nobody looks.", ("hang",))
    assert (found.rejected_by, found.code) == (("ddp.a.b", "ddp.c.d"), One)
    assert found.functions is not None
    assert found.functions() == {"ddp": One.ddp}
    assert (found.patches, found.alone, found.is_benign) == ((), False, False)


def test_a_patched_class_is_a_card_of_one_patch(catalogue):
    @card.benign("benign.same")
    class Same(card.Patched):
        """Is the same."""

        module, find, replace = "solution.step", "a", "b"

    found = catalogue["benign.same"]
    assert (found.does, found.seen, found.unseen) == ("Is the same.", "", "")
    assert (found.patches, found.functions) == ((("solution.step", "a", "b"),), None)
    assert found.is_benign
    assert found.code is Same


@pytest.mark.parametrize(
    "story",
    [
        "Does it.",
        "Does it.\n\nFrom: a bug.",
        "Does it.\n\nUnseen: nobody looks.",
        "Does it.\n\nUnseen: nobody looks.\nFrom: a bug.",
        "Does it.\nFrom: a bug.\nUnseen: nobody looks.",
    ],
)
def test_a_story_that_lacks_a_part_is_an_error(catalogue, story: str):
    with pytest.raises(ValueError, match=r'ddp\.lost: expected .* of Lost with .* "Unseen: ..."'):
        card.near_miss("ddp.lost", rejected_by="ddp.a.b")(type("Lost", (), {"__doc__": story}))
    assert catalogue == {}


def test_a_docstring_of_the_base_is_no_story():
    with pytest.raises(ValueError, match=r"Lost: expected a docstring"):
        card.benign("benign.lost")(type("Lost", (card.Patched,), {}))


def test_an_id_is_taken_once():
    same = type("Same", (), {"__doc__": "Is the same."})
    card.benign("benign.same")(same)
    with pytest.raises(ValueError, match=r"benign\.same: expected an id of its own"):
        card.benign("benign.same")(same)


def test_plain_offers_nearly_all_of_the_contract():
    found = Implementation("plain", plain)
    assert set(FUNCTIONS) - {*found.offered} == {"flash_attention_triton", "flops_per_token"}
    assert found.misfits == {}


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(plain.__path__)])
def test_a_plain_file_teaches_its_algorithm_and_is_short(name: str):
    module = importlib.import_module(f"spec_tests.plain.{name}")
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    head = ast.get_docstring(ast.parse(text)) or ""
    assert all(word in head for word in ("Problem:", "Idea:", "Steps"))
    assert "Paper:" in head or "Source:" in head
    assert len(text.splitlines()) <= 450
