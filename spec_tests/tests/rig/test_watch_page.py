"""The page of a watched run, from data made by hand: what it says, its size, how it looks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spec_tests.tests.rig.browser import require_decent
from spec_tests.watch.page import page

EVIL = "<script>alert(1)</script>&\"'"
SENTENCES = {
    "watch.batches.distinct": "A rank MUST NOT train on the batch of another rank.",
    "watch.gradients.equal": "Gradients MUST be equal on all ranks.",
    "watch.loss.token-counts": "Means SHOULD be weighted by the counts.",
}


def cause(norm: str, step: int, **fields: Any) -> dict[str, Any]:
    empty = {"rank": None, "tensor": "", "place": "", "likely": "", "is_advice": False}
    kind = {"sentence": SENTENCES[norm], "strength": "MUST", "effects": [], "times": 1}
    return {"norm": norm, "text": f"{norm}: got {EVIL}", "step": step, **empty, **kind, **fields}


def data(steps: int = 100, ranks: int = 4, **fields: Any) -> dict[str, Any]:
    """A run with three causes, of which the first in order is advice."""
    causes = [
        cause("watch.loss.token-counts", 7, strength="SHOULD"),
        cause("watch.batches.distinct", 3, rank=1, place=f"train.py:88 {EVIL}", times=17),
        cause("watch.gradients.equal", 40, effects=["watch.replicas.equal"], likely=EVIL),
    ]
    timeline = [
        [rank, step, 1.7e9 + 0.07 * step + 0.003 * rank, 1.7e9 + 0.07 * step + 0.02]
        for step in range(1, steps + 1)
        for rank in range(ranks)
    ]
    return {
        "command": ["torchrun", "train.py", "--name", EVIL, "x" * 300],
        "status": 1,
        "is_compared": True,
        "steps": steps,
        "ranks": ranks,
        "timeline": timeline,
        "unseen": [f"rank 1: {EVIL}"],
        "compared": f"step 7, gradient of {EVIL}",
        "causes": causes,
        "headline": f"2 causes in {steps} steps {EVIL}",
        **fields,
    }


def test_the_page_says_everything_escaped_with_what_is_wrong_first():
    text = page(data())
    assert "<script" not in text
    said = [*SENTENCES.values(), "train.py:88", "first in step 3, in at least 17 steps"]
    said.append('<p class="verdict bad"><strong>2 causes in 100 steps')
    assert [words for words in said if words not in text] == []
    cards = re.findall(r'<section class="card(.*?)" id="found-(.*?)"', text)
    assert [norm.split(".")[1] for _, norm in cards] == ["batches", "gradients", "loss"]
    assert [kind for kind, _ in cards] == ["", "", " advice"]
    assert '<g class="bad"><title>rank 1, step 3: [watch' in text


@pytest.mark.parametrize(("steps", "ranks", "thinned"), [(100, 4, False), (5000, 8, True)])
def test_the_page_is_small_and_a_long_run_thinned(steps: int, ranks: int, thinned: bool):
    text = page(data(steps, ranks))
    assert len(text.encode()) < 60_000
    assert f"rank {ranks - 1}, step 40: [watch.gradients.equal]" in text
    assert ("one in 50 is drawn" in text) == thinned


def test_the_page_can_be_read_and_is_not_wider_than_a_phone(tmp_path: Path, browser):
    file = tmp_path / "index.html"
    file.write_text(page(data()), encoding="utf-8")
    require_decent(browser, file)
