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
from spec_tests.rig.report.eventlog import read_log
from spec_tests.rig.report.source import source_of
from spec_tests.tests.rig.test_command import spec_tests


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


def cells_drawn(picture: str, name: str) -> float:
    """How many cells the runs of a pattern cover."""
    paths = re.findall(rf'url\(#{name}\)" d="([^"]*)"', picture)
    return sum(int(wide) for path in paths for wide in re.findall(r"h(\d+)", path)) / pictures.CELL


# ----------------------------------------------------------------------------------- heat maps


def test_a_wrong_tensor_is_kept_and_drawn_element_by_element():
    right = torch.zeros(2, 3)
    bad = torch.tensor([[0.0, 1.0, 1.0], [0.0, float("nan"), 0.0]])

    wrong = kept_of(right, bad, expected=right)["wrong"]

    assert wrong == {
        "name": "w",
        "shape": [2, 3],
        "ranks": {"0": ["000000", 2, 3], "1": ["0110x0", 2, 3]},
    }
    picture = pictures.heat_maps({**wrong, "name": "<w>"})
    assert texts(picture) == ["rank 0: 0/6", "rank 1: 3/6"]
    assert [cells_drawn(picture, name) for name in ("right", "wrong", "odd")] == [12, 2, 1]
    assert re.findall("<desc>(.*?)</desc>", picture) == [
        "rank 0: 0 of 6 cells wrong",
        "rank 1: 3 of 6 cells wrong",
    ]
    assert "&lt;w&gt;" in picture
    assert "crossed: wrong; ringed: not finite" in picture


@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [((7,), 1, 7), ((20,), 2, 16), ((1000,), 16, 16), ((3, 70), 3, 14), ((40, 2, 9), 14, 9)],
    ids=str,
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_grid_is_small_whatever_the_tensor(shape, rows, columns, ranks):
    expected = torch.zeros(shape)
    bad = expected.clone()
    bad.view(-1)[-1] = 1

    wrong = kept_of(*[bad] * ranks, expected=expected)["wrong"]

    assert len(json.dumps(wrong)) < 1300
    cells, *size = wrong["ranks"]["0"]
    assert cells.rstrip("-")[-1] == "1", "pooling keeps what is wrong"
    assert cells.count("1") == 1
    assert len(cells) == size[0] * size[1]
    assert max(size) <= 16
    if ranks <= 4:
        assert size == [rows, columns]
    larger = "the worst of several" in pictures.heat_maps(wrong)
    assert larger == (cells.count("1") + cells.count("0") < expected.numel())


@pytest.mark.parametrize(
    ("observed", "size"),
    [(None, 2), (torch.ones(3), 2), (torch.ones(1), 1)],
    ids=["none", "other shape", "one element"],
)
def test_what_has_no_elements_to_compare_has_no_picture(observed, size):
    assert kept_of(observed, expected=torch.zeros(size)) == {}


def test_ranks_that_hold_no_part_or_nothing_have_no_cells():
    shards = [{"w": torch.zeros(2)}, {"w": torch.zeros(0)}, {"w": torch.zeros(2)}]
    seen: list[judge.Tensors] = [{"w": torch.ones(2)}, {"w": torch.zeros(0)}, {"w": None}]
    with pytest.raises(judge.Violation) as caught:
        judge.tensors(seen, shards, quantity="weight")
    assert evidence.of(caught.value)["wrong"]["ranks"] == {"0": ["11", 1, 2], "2": ["--", 1, 2]}


# ---------------------------------------------------------------------------------- swim lanes


def reports(*lists: str, states: tuple[str, str] = ("in the body", "returned")) -> list[RankReport]:
    return [
        RankReport(rank, states[rank], collectives=tuple(f"{each} of 0" for each in of.split("|")))
        for rank, of in enumerate(lists)
    ]


def test_a_blocked_rank_stands_beside_the_one_that_never_came():
    shared = "all_reduce [[5, 6]] #7"
    ranks = reports(f"{shared}|all_reduce [[3]] #8", f"broadcast [[2]] #6|{shared}")
    kept = evidence.of(RankHung("hang: rank 0 blocked", 0, ranks))["lanes"]

    assert kept[0] == {
        "rank": 0,
        "state": "in the body",
        "waits": True,
        "calls": [["all_reduce [[5, 6]]", 7, "0"], ["all_reduce [[3]]", 8, "0"]],
    }
    picture = pictures.lanes(kept)
    assert rows_of(picture) == [
        ["#", "rank 0 is blocked", "rank 1 returned"],
        ["#6", "…", "broadcast 2"],
        ["#7", "all_reduce 5×6", "all_reduce 5×6"],
        ["#8", "all_reduce 3", "not issued"],
    ]
    assert picture.count('class="call waits"') == 1
    assert "≠" not in picture


def drawn_of(*lists: str, states: tuple[str, str] = ("killed", "in the body")) -> str:
    """The lanes of two ranks of which one died."""
    ranks = reports(*lists, states=states)
    return pictures.lanes(evidence.of(RankDied("rank 0 of 2: killed", 0, ranks))["lanes"])


def test_ranks_that_issue_different_collectives_are_marked_where_they_part():
    picture = drawn_of("all_reduce [[3]] #8", "all_reduce [[4]] #8")
    assert ["#8", "≠ all_reduce 3", "≠ all_reduce 4"] in rows_of(picture)
    assert "waits" not in picture, "of a rank that died nobody knows"
    assert "≠" not in drawn_of("send [[1]] #8", "recv [[1]] #8")
    simulated = drawn_of("all_reduce (sizes (30, 4), dtypes ('float32',)) #8", "barrier #8")
    assert ["#8", "≠ all_reduce 30+4", "≠ barrier"] in rows_of(simulated)


def test_lanes_of_several_groups_keep_the_order_of_each_rank():
    calls = [["a", 1, "0"], ["b", 1, "1"], ["c", 2, "0"]], [["b", 1, "1"], ["c", 2, "0"]]
    ranks = [
        {"rank": rank, "state": "", "waits": False, "calls": of} for rank, of in enumerate(calls)
    ]
    rows = [["#1 of 0", "a", "…"], ["#1 of 1", "b", "b"], ["#2 of 0", "c", "c"]]
    assert rows_of(pictures.lanes(ranks))[1:] == rows


def test_a_rank_of_which_nothing_is_known_has_a_column_as_well():
    ranks = [
        RankReport(0, "in the body", collectives=("barrier #1 of 0",)),
        RankReport(1, "killed"),
    ]
    kept = evidence.of(RankHung("hang: rank 0 blocked", 0, ranks))["lanes"]
    shown = rows_of(pictures.lanes(kept))
    assert shown == [["#", "rank 0 is blocked", "rank 1 killed"], ["#1", "barrier", "none known"]]


def test_without_known_collectives_there_are_no_lanes():
    assert evidence.of(RankHung("hang", 0, [RankReport(0, "in the body")])) == {}
    assert evidence.of(ValueError()) == evidence.of(None) == {}


# -------------------------------------------------------------------------------------- memory

HISTORY = [("built", 10_000), ("after forward", 30_000), ("after step 0", 12_000)]


def held(number: int, history: list[tuple[str, int]], moment: str) -> dict[str, Any]:
    with pytest.raises(judge.Violation) as caught:
        footprint.at_most(
            [0, number], {"a": 20_000}, quantity="b", history=[[], history], moment=moment
        )
    found: dict[str, Any] = evidence.of(caught.value)["memory"]
    return found


def test_memory_over_time_is_a_step_line_against_the_limit_of_one_moment():
    kept = held(30_000, HISTORY, "after forward")
    assert kept == {"rank": 1, "points": HISTORY, "judged": 1, "allowed": 20_000} | {
        "points": [list(point) for point in HISTORY]
    }
    picture = pictures.memory(kept)
    line = re.search(r'class="line" d="([^"]*)"', picture)
    assert line is not None
    assert line[1].count("H") == 3
    assert {"measured 30 kB", "allowed 20 kB", "built"} <= set(texts(picture))
    assert picture.count('class="judged"') == 2, "two lines of words"


def test_one_number_is_a_bar_and_a_long_history_is_cut_around_what_is_judged():
    assert texts(pictures.memory(held(30_000, [], ""))) == ["allowed 20 kB", "measured 30 kB"]
    long = [(f"after step {step}", 25_000 + step) for step in range(200)]
    kept = held(25_190, long, "after step 190")
    assert len(kept["points"]) == evidence.MAX_POINTS
    assert kept["points"][kept["judged"]] == ["after step 190", 25_190]
    assert len(texts(pictures.memory(kept))) == 2 + 3 * 2


# -------------------------------------------------------------------------------------- source


def test_the_line_of_the_judged_code_is_kept_with_its_neighbours(tmp_path: Path):
    mine = tmp_path / "mine.py"
    mine.write_text("\n".join(f"line_{number}" for number in range(1, 9)))
    trace = 'File "{}", line {}, in f\n  File "/x/site-packages/torch/a.py", line 1, in g'
    found = source_of(trace.format(mine, 4))
    assert found == {"file": "mine.py", "line": 4, "first": 2} | {
        "lines": [f"line_{number}" for number in (2, 3, 4, 5, 6)]
    }
    assert source_of(trace.format(mine, 1))["lines"] == ["line_1", "line_2", "line_3"]
    for nothing in (trace.format(mine, 99), trace.format(tmp_path / "gone.py", 1), "no trace"):
        assert source_of(nothing) == {}
    suite = __file__.replace("tests/rig/test_pictures", "rig/clause")
    assert source_of(trace.format(suite, 1)) == {}


# ----------------------------------------------------------------------------------- end to end

FAULTY = """\
import torch.distributed as dist
def ddp(module, *, process_group=None):
    return module
def finish_gradient_synchronization(wrapped):
    for parameter in wrapped.parameters():
        dist.all_reduce(parameter.grad)
"""


def test_a_faulty_file_gets_a_card_with_its_line_and_its_picture(tmp_path: Path):
    (tmp_path / "mine.py").write_text(FAULTY)
    clauses = "ddp.gradients.mean,ddp.gradients.frozen-stay-none,fsdp.footprint.no-growth"
    flags = ("--impl", "mine.py", "--clause", clauses, "--report", "out")
    ended = spec_tests(*flags, cwd=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr

    page = (tmp_path / "out/index.html").read_text()
    events = read_log(tmp_path / "out/events.jsonl")
    report = json.loads((tmp_path / "out/report.json").read_text())

    assert 'class="hit">→   6          dist.all_reduce(parameter.grad)</span>' in page
    assert len(page) < 60_000
    kinds = {kind for event in events for kind in event.get("evidence", {})}
    assert kinds == {"source", "wrong"}
    assert kinds == {
        kind
        for row in report["clauses"]
        for case in row["cells"]["mine.py"]["cases"]
        for kind in case["evidence"]
    }
    assert "Clauses on what is not offered: fsdp 1</summary>" in page
    assert '<li>fsdp: <span class="id">fully_shard, fsdp</span>' in page
