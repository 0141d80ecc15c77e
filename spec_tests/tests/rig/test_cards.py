"""A near-miss is a difference or a class, with its story, and the museum is what these say.

A plain base teaches its algorithm.
"""

import ast
import importlib
import pkgutil
import sys
from pathlib import Path

import pytest

from spec_tests import plain
from spec_tests.contract import FUNCTIONS
from spec_tests.museum import card, rule
from spec_tests.rig.target import Implementation


@pytest.fixture
def catalogue(monkeypatch) -> dict[str, card.Impostor]:
    """An empty catalogue in the place of the real one."""
    empty: dict[str, card.Impostor] = {}
    monkeypatch.setattr(card, "CATALOGUE", empty)
    return empty


def test_a_line_of_a_difference_says_whether_it_stays(catalogue):
    with pytest.raises(ValueError, match=r"expected a line that begins with .* got 'b'"):
        card.Source("solution.step").benign("benign.same", "- a", "b", does="Is the same.")


def test_a_difference_of_plain_code_is_nobody_elses(catalogue):
    own = sys.modules["spec_tests.plain.clip"]
    card.Source(own.__name__).benign("benign.one", "- return norm", "+ return 7", does="Is 7.")
    wrong = catalogue["benign.one"].functions
    assert wrong is not None
    assert wrong()["clip_grad_norm_"]([], 1.0) == 7
    assert sys.modules["spec_tests.plain.clip"] is own
    assert sys.modules["spec_tests.plain"] is plain
    assert own.PlainClip.functions()["clip_grad_norm_"]([], 1.0) == 0


@pytest.mark.parametrize(
    "story",
    [
        "Does it.\n\nFrom: a bug.",
        "Does it.\n\nUnseen: nobody looks.",
        "Does it.\nFrom: a bug.\nUnseen: nobody looks.",
    ],
)
def test_a_story_that_lacks_a_part_is_an_error(catalogue, story: str):
    with pytest.raises(ValueError, match=r'ddp\.lost: expected .* of Lost with .* "Unseen: ..."'):
        card.near_miss("ddp.lost", rejected_by="ddp.a.b")(type("Lost", (), {"__doc__": story}))
    assert catalogue == {}


def test_an_id_is_taken_once(catalogue):
    same = type("Same", (), {"__doc__": "Is the same."})
    card.benign("benign.same")(same)
    with pytest.raises(ValueError, match=r"benign\.same: expected an id of its own"):
        card.benign("benign.same")(same)


def test_plain_offers_nearly_all_of_the_contract():
    found = Implementation("plain", plain)
    assert set(FUNCTIONS) - {*found.offered} == {"flash_attention_triton", "flops_per_token"}
    assert found.misfits == {}


@pytest.mark.parametrize("name", [module.name for module in pkgutil.iter_modules(plain.__path__)])
def test_a_plain_file_teaches_its_algorithm(name: str):
    module = importlib.import_module(f"spec_tests.plain.{name}")
    assert module.__file__ is not None
    text = Path(module.__file__).read_text(encoding="utf-8")
    head = ast.get_docstring(ast.parse(text)) or ""
    assert all(word in head for word in ("Problem:", "Idea:", "Steps"))
    assert "Paper:" in head or "Source:" in head


def test_no_near_miss_falls_but_for_the_exceptions():
    assert rule.falling() == {}
    assert rule.falling(exceptions=()).keys() == rule.STAYS.keys()
