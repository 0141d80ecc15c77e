"""From a failed assertion to a picture: what is kept of it, how large it is, and what is drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests.programs.laws import footprint
from spec_tests.rig import judge
from spec_tests.rig.judge import evidence
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankReport
from spec_tests.rig.report import pictures
from spec_tests.rig.report.causes import source_of


def kept_of(*observed: torch.Tensor | None, expected: torch.Tensor) -> dict[str, Any]:
    """The evidence of a judgement on one tensor."""
    with pytest.raises(judge.Violation) as caught:
        judge.tensors([{"w": seen} for seen in observed], {"w": expected}, quantity="weight")
    return evidence.of(caught.value)


def texts(picture: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", picture)


def rows_of(picture: str) -> list[list[str]]:
    """The cells of a table, row by row, as text."""
    rows = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in picture.split("<tr>")[1:]]
    return [[re.sub("<[^>]*>", "", cell) for cell in row] for row in rows]


def test_a_wrong_tensor_is_kept_and_drawn_element_by_element():
    bad = torch.tensor([[0.0, 1.0, 1.0], [0.0, float("nan"), 0.0]])
    wrong = kept_of(torch.zeros(2, 3), bad, expected=torch.zeros(2, 3))["wrong"]
    ranks = {"0": ["000000", 2, 3], "1": ["0110x0", 2, 3]}
    assert wrong == {"name": "w", "shape": [2, 3], "ranks": ranks}
    picture = pictures.heat_maps({**wrong, "name": "<w>"})
    assert texts(picture) == ["rank 0: 0/6", "rank 1: 3/6"]
    assert "rank 1: 3 of 6 cells wrong" in picture, "in words for who sees no picture"
    assert "&lt;w&gt;" in picture


@pytest.mark.parametrize("shape", [(7,), (1000,), (3, 70), (40, 2, 9)], ids=str)
def test_a_grid_is_small_whatever_the_tensor(shape: tuple[int, ...]):
    bad = torch.zeros(shape)
    bad.view(-1)[-1] = 1
    wrong = kept_of(*[bad] * 8, expected=torch.zeros(shape))["wrong"]
    assert len(json.dumps(wrong)) < 1300
    cells, rows, columns = wrong["ranks"]["0"]
    assert max(rows, columns) <= 16
    assert len(cells) == rows * columns
    assert cells.rstrip("-")[-1] == "1", "pooling keeps what is wrong"
    assert cells.count("1") == 1
    is_pooled = cells.count("1") + cells.count("0") < bad.numel()
    assert ("the worst of several" in pictures.heat_maps(wrong)) == is_pooled


@pytest.mark.parametrize("observed", [None, torch.ones(3)], ids=["none", "other shape"])
def test_what_has_no_elements_to_compare_has_no_picture(observed):
    assert kept_of(observed, expected=torch.zeros(2)) == {}


# ---------------------------------------------------------------------------------- swim lanes


def drawn_of(*lists: str, has_died: bool = False) -> list[list[str]]:
    """The rows of the lanes of two ranks that issued these; one hangs, or has died."""
    states = ("killed" if has_died else "in the body", "returned")
    ranks = [
        RankReport(rank, states[rank], collectives=tuple(f"{e} of 0" for e in of.split("|") if e))
        for rank, of in enumerate(lists)
    ]
    kind, said = (RankDied, "rank 0 of 2: killed") if has_died else (RankHung, "hang: rank 0")
    return rows_of(pictures.lanes(evidence.of(kind(said, 0, ranks))["lanes"]))


def test_a_blocked_rank_stands_beside_the_one_that_never_came():
    shared = "all_reduce [[5, 6]] #7"
    assert drawn_of(f"{shared}|all_reduce [[3]] #8", f"broadcast [[2]] #6|{shared}") == [
        ["#", "rank 0 is blocked", "rank 1 returned"],
        ["#6", "…", "broadcast 2"],
        ["#7", "all_reduce 5×6", "all_reduce 5×6"],
        ["#8", "all_reduce 3", "not issued"],
    ]
    assert drawn_of("barrier #1", "")[1:] == [["#1", "barrier", "none known"]]
    assert evidence.of(RankHung("hang", 0, [RankReport(0, "in the body")])) == {}


@pytest.mark.parametrize(
    ("one", "other", "row"),
    [
        ("all_reduce [[3]] #8", "all_reduce [[4]] #8", ["#8", "≠ all_reduce 3", "≠ all_reduce 4"]),
        ("send [[1]] #8", "recv [[1]] #8", ["#8", "send 1", "recv 1"]),
        (  # as simulated ranks say it
            "all_reduce (sizes (30, 4), dtypes ('float32',)) #8",
            "barrier #8",
            ["#8", "≠ all_reduce 30+4", "≠ barrier"],
        ),
    ],
)
def test_ranks_that_issue_different_collectives_are_marked_where_they_part(one, other, row):
    assert drawn_of(one, other, has_died=True)[1:] == [row]


def test_lanes_of_several_groups_keep_the_order_of_each_rank():
    calls = [["a", 1, "0"], ["b", 1, "1"], ["c", 2, "0"]], [["b", 1, "1"], ["c", 2, "0"]]
    ranks = [
        {"rank": rank, "state": "", "waits": False, "calls": of} for rank, of in enumerate(calls)
    ]
    rows = [["#1 of 0", "a", "…"], ["#1 of 1", "b", "b"], ["#2 of 0", "c", "c"]]
    assert rows_of(pictures.lanes(ranks))[1:] == rows


# -------------------------------------------------------------------------------------- memory


def held(number: int, history: list[tuple[str, int]], moment: str) -> dict[str, Any]:
    with pytest.raises(judge.Violation) as caught:
        footprint.at_most(
            [0, number], {"a": 20_000}, quantity="b", history=[[], history], moment=moment
        )
    return evidence.of(caught.value)["memory"]


def test_memory_over_time_is_a_step_line_against_the_limit_of_one_moment():
    history = [("built", 10_000), ("after forward", 30_000), ("after step 0", 12_000)]
    kept = held(30_000, history, "after forward")
    points = [[*point] for point in history]
    assert kept == {"rank": 1, "points": points, "judged": 1, "allowed": 20_000}
    picture = pictures.memory(kept)
    assert {"measured 30 kB", "allowed 20 kB", "built"} <= set(texts(picture))
    assert 'class="line"' in picture
    assert texts(pictures.memory(held(30_000, [], ""))) == ["allowed 20 kB", "measured 30 kB"]


def test_a_long_history_is_cut_around_what_is_judged():
    long = [(f"after step {step}", 25_000 + step) for step in range(200)]
    kept = held(25_190, long, "after step 190")
    assert len(kept["points"]) == evidence.MAX_POINTS
    assert kept["points"][kept["judged"]] == ["after step 190", 25_190]


# -------------------------------------------------------------------------------------- source


def test_the_line_of_the_judged_code_is_kept_with_its_neighbours(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("\n".join(f"line_{number}" for number in range(1, 9)))
    trace = 'File "{}", line {}, in f\n  File "/x/site-packages/torch/a.py", line 1, in g'
    lines = [f"line_{number}" for number in (2, 3, 4, 5, 6)]
    found = source_of(trace.format(mine, 4))
    assert found == {"file": "mine.py", "line": 4, "first": 2, "lines": lines}
    suite = __file__.replace("tests/rig/test_pictures", "rig/clause")
    for nothing in ((mine, 99), (tmp_path / "gone.py", 1), (suite, 1)):
        assert source_of(trace.format(*nothing)) == {}
