"""The world model: what its words mean, that its faults can be seen, and that it shrinks."""

from __future__ import annotations

import itertools
import random
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spec_tests.impls import parse
from spec_tests.programs import declared, draw, explore, law, seeds, shrink, trained
from spec_tests.programs.alone import SEED, Alone
from spec_tests.programs.calls import VERBS, after, parsed, spelled
from spec_tests.programs.faults import FAULTS
from spec_tests.programs.pieces import Piece, put_together
from spec_tests.programs.scene import AXES_OF, Scene
from spec_tests.programs.stepped import Stepped
from spec_tests.rig import strategies
from spec_tests.rig.judge import Situation, Violation, judging, runner, violated
from spec_tests.rig.judge.oracle import parameters
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.toys import TOYS, sum_of_squares
from spec_tests.tests.rig.helpers import clause_named

LINE = "stack nested held two: backward 0, accumulate 1, backward 2, step, evaluate 9"


def test_a_line_is_read_as_it_is_written():
    scene, program = law.read(LINE)
    assert law.written(scene, program) == LINE.removeprefix("stack ")  # the ordinary word
    assert parsed(spelled(program)) == program


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stack stak: step", "'stak' is no word"),
        ("freed held: step", "both of reshard"),
        ("mlp: steps", "'steps' is no call"),
        ("mlp: zero_grad", "with how"),
        ("mlp: backward x", "with micro"),
        ("mlp: backward 0, freeze 1", r"call 2 is 'freeze', and it is a call of fully_shard, "),
        ("2x2: backward 0", r"ddp on 2 ranks: its words do not exist together there"),
        ("mlp: accumulate 0, step", r"call 2 is 'step', and the contract does not say"),
    ],
)
def test_what_is_no_situation_is_refused_with_the_known_words(line, said):
    with pytest.raises(ValueError, match=said):
        law.legal(line, "ddp", 2)


@pytest.mark.parametrize(
    "line",
    [
        "forward 0, step",
        "fails_backward 0 first, step",
        "load copied",  # nothing was saved
        "pending",
        "mlp: freeze 1, freeze 1",
    ],
)
def test_calls_that_the_contract_leaves_open_are_not_legal(line):
    scene, program = law.read(line)
    assert after(program, scene, "fully_shard", 2) is None


WINDOW = "backward 5, zero_grad none, backward 0, accumulate 1, backward 2, step, evaluate 9"
TELLS = {
    **dict.fromkeys(FAULTS, WINDOW),
    "one-replica": "replicas: backward 0",
    "one-optimizer": "two: backward 0, step",
    "not-thawed": "freeze 1, backward 0",
    "frozen-trains": "not-the-first: backward 0",
    **dict.fromkeys(("first-use-alone", "last-use-alone"), "tied: backward 0"),
    "unreduced-never-cleared": "accumulate 0, zero_grad none, backward 1",
    "own-buffers": "counting: backward 0, step, backward 1",
    "buffers-in-no-sync": "replacing: backward 0, accumulate 1, backward 2",
    **dict.fromkeys(("divided-by-world", "over-world"), "apart: backward 0"),
    "reduced-in-no-sync": "accumulate 0, local",
    **dict.fromkeys(("own-start", "mean-start", "last-start"), "seed-by-rank: step"),
    "start-of-another-group": "apart seed-by-rank: step",
}


# These have another diagnosis.
ELSE = ("summed", "divided-twice", "all-but-the-last", "not-thawed", "frozen-trains")


def judged(line: str, size: int, fault: str) -> None:
    scene, program = law.read(line)
    given = FAULTS[fault], (is_replicated := "buffers" in fault)
    ranks = [Alone(scene, size, rank, *given).follow(program) for rank in range(size)]
    with judging(Situation()):
        law.judge_values(ranks, "ddp" if is_replicated else "fully_shard", line)


def test_each_fault_is_told_by_a_situation_and_named():
    for fault in FAULTS:
        judged("another_lives, evaluate 0", 2, fault)  # which tells none
        said = None if fault in ELSE else re.escape(FAULTS[fault].means)
        with pytest.raises(Violation, match=said):
            judged(TELLS[fault], 3, fault)
    with pytest.raises(Violation):
        judged("backward 0, clip two", 2, "summed")


@pytest.mark.parametrize("subject", AXES_OF)
def test_every_two_words_meet_in_a_row_and_programs_are_legal_and_use_every_verb(subject):
    chance, used = random.Random(0), set()
    for size in (2, 4):
        rows = draw.covering(subject, size, "production")
        met = {
            frozenset(pair)
            for row in rows
            for pair in itertools.combinations((row.word(a) for a in AXES_OF[subject]), 2)
        }
        assert draw.pairs(subject, size, "production").keys() <= met
        assert all(row.exists(subject, size) for row in rows)
        for row in rows:  # one that is not there is an IndexError, which passes for a refusal
            assert {*row["ignored"]} <= {*range(len(parameters(row["toy"][0], 0)))}
        assert len(rows) < 180
    # On four ranks every word exists.
    for row in rows + 2 * rows[:24]:  # those of a trainer more often: they are few
        line = draw.situation_in(row, subject, size, "production", chance)
        _, program, _ = law.legal(line, subject, size)
        used |= {name for name, *_ in program}
    assert used == {name for name, verb in VERBS.items() if subject in verb.of and verb.often}


@pytest.mark.parametrize("precision", ["half", "brain", "reduced-half", "half-reduced-wide"])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_narrow_toy_is_exact_in_few_bits(precision, size):
    """The sum of the sizes of all shares is a multiple that the dtype holds, in any order."""
    scene = Scene.of(f"narrow {precision}")
    policy = scene["precision"]
    one = policy.get("param_dtype", torch.float32)  # a backward's; sums are of the other
    most, dtype = scene.most(size), policy.get("reduce_dtype", one)
    if most < 1:
        pytest.skip("not drawn at this size")
    for first in range(0, 100, 7):
        total: dict[str, torch.Tensor] = {}
        for micro, rank in itertools.product(range(first, first + most), range(size)):
            module = TOYS["narrow"].build(SEED)
            sum_of_squares(module(TOYS["narrow"].batch(SEED, rank=rank, micro=micro))).backward()
            for name, parameter in module.named_parameters():
                gradient: Any = parameter.grad
                total[name] = total.get(name, torch.zeros(())) + gradient.abs()
                assert (gradient.abs() / 2).max() <= 2 / torch.finfo(one).eps / size
        for name, sizes in total.items():
            units = sizes / 2  # all shares are multiples of this
            assert units.max() <= 2 / torch.finfo(dtype).eps, (name, float(units.max()))


def test_what_fails_is_shrunk_to_what_is_needed():
    failure = Violation("wrong")

    def judged(line):
        scene, program = law.read(line)
        names = [call[0] for call in program]
        is_wrong = scene.word("reshard") == "held" and names[:1] == ["backward"] and "step" in names
        return failure if is_wrong else None

    smallest = partial(shrink.smallest, subject="fully_shard", size=2)
    found, _ = smallest(LINE, failure, judged, is_avoided=lambda line: "backward 0" in line)
    assert found == "held: backward 2, step"


@pytest.mark.parametrize("is_read", [True, False])
def test_what_was_drawn_is_told_as_its_smallest_situation_and_in_words(is_read, monkeypatch):
    def judged(world, subject, line, *, looks):
        if "step" in line:
            raise violated("expected the weight at call 4, step, got another")

    monkeypatch.setattr(law, "same_as_alone", judged)
    world: Any = SimpleNamespace(size=2, transport="gloo", target=parse("plain"))
    line = "mlp two: backward 0, accumulate 1, backward 2, step, evaluate 9"
    words = (
        "in words: step: every optimizer steps"
        if is_read
        else "in words: mlp: two layers, .*; two: two optimizers, each"
    )
    with (
        strategies.profile("quick" if is_read else "impostors"),
        judging(Situation()),
        pytest.raises(Violation, match=words),
    ):
        draw._judge(world, "ddp", [line])


def test_each_seed_has_a_clause_that_tries_it_on_as_many_ranks():
    worlds = {
        (function, clause.level): clause.worlds
        for clause in load_all()
        if re.search(r"\.programs\.any(-production)?-situation$", clause.id)
        for function in clause.judges
    }
    untried = [s for s in seeds.load() if s.size not in worlds.get((s.judges, s.level), ())]
    assert not untried


def test_a_seed_that_is_appended_is_read_again_if_it_is_legal(tmp_path):
    assert len(seeds.load()) > 10, "those of the suite are legal"
    file = tmp_path / "mine.toml"
    seed = seeds.Seed("ddp", "mlp: backward 0, step", 'a "quoted" source', 3)
    seeds.append(file, seed)
    assert seeds.load(file) == (seed,)
    wrong = tmp_path / "wrong.toml"
    seeds.append(wrong, seeds.Seed("ddp", "mlp: accumulate 0, step", "no source"))
    with pytest.raises(ValueError, match=r"entry 1: .* no situation of ddp on 2 ranks: call 2 is"):
        seeds.load(wrong)


@pytest.mark.parametrize(
    "entry", declared.of(parse("torch")), ids=lambda e: f"{e.judges}-{e.shows}"
)
def test_what_is_declared_of_torch_still_fails(worlds, entry):
    """An entry whose example passes is stale: delete it."""
    found = explore.Exploration(parse("torch"), worlds, "correct")
    asked = seeds.Seed(entry.judges, entry.shows, entry.reason, entry.size)
    assert found.failure(asked) is not None


OBSERVED = {
    "keeps-discarded-gathers": (
        f"even: {', '.join(['unshard in-flight, reshard'] * 3)}",
        "bytes held",
    ),
    "casts-buffers": ("counting wide: backward 0", "buffer of dtype 'float32'"),
}
"""Near-miss to a situation in which every value is right, and to what an observer says of it."""


@pytest.mark.parametrize("fault", OBSERVED)
def test_observers_see_what_values_do_not_show(worlds, fault):
    line, said = OBSERVED[fault]
    world = worlds.world(2, parse(f"impostor:fsdp.{fault}"))
    law.same_as_alone(world, "fully_shard", line)
    with judging(Situation()), pytest.raises(Violation, match=said):
        law.same_as_alone(world, "fully_shard", line, looks=True)


@pytest.mark.parametrize(
    ("fault", "line", "said"),
    [
        ("deaf", "even adamw: rate 0.5, deal 1 all, update", "inner optimizer has its own options"),
        ("deaf-later", "even: save, load copied, rate 0.5, deal 1 all, update", "after a load a"),
        ("frozen-trains", "frozen momentum: train 1", "frozen weights are trained"),
        ("interrupted-stays", "mlp of-two: fails 9 last, train 2", "the interrupted step"),
        ("untied", "tied momentum: train 1", "the tie, or the other gradient, is lost"),
    ],
)
def test_a_mistake_of_an_optimizer_or_a_trainer_has_its_name(fault, line, said):
    scene, program = law.read(line)
    if fault.startswith("deaf"):
        judge: Any = partial(law.judge_updates, [Stepped(scene, fault).follow(program)], line)
    else:
        seen = trained.one_process(scene, 1, 0, {}, fault).follow(program)
        shown = [{"declares": {}, "seen": seen}]
        judge = partial(trained.judge_trained, shown, scene, program, line)
    with judging(Situation()), pytest.raises(Violation, match=said):
        judge()


def test_pieces_are_put_together_and_one_that_is_missing_is_missed():
    def seen(rank: int, piece: Piece | None) -> Any:
        return [("backward 0", {"w": piece, "plain": torch.ones(1) * rank})]

    parts = [Piece(torch.ones(2, 3) * rank, (4, 3), 0, (0, 1)) for rank in (0, 1)]
    both = put_together([seen(rank, part) for rank, part in enumerate(parts)])
    assert both[0][0][1]["w"].tolist() == both[1][0][1]["w"].tolist()
    assert both[0][0][1]["w"][:, 0].tolist() == [0.0, 0.0, 1.0, 1.0]
    one = put_together([seen(0, parts[0]), seen(1, None)])
    assert [seen[0][1]["w"] for seen in one] == [None, None]


def test_explore_finds_shrinks_and_says_how_to_see_it_again(capsys):
    asked = ["--impl", "impostor:ddp.sum-for-mean", "--functions", "ddp"]
    status = explore.main([*asked, "--worlds", "2", "--first"])

    shown = capsys.readouterr().out
    assert status == 1, shown
    assert "ddp on 2 ranks: " in shown
    line = shown.partition("ddp on 2 ranks: ")[2].partition("\n")[0]
    assert len(law.read(line)[1]) <= 4, line
    assert f"--line '{line}'" in shown


DDP_ALONE = """
from spec_tests.plain.ddp import PlainDdp

ddp = PlainDdp.functions()["ddp"]
finish_gradient_synchronization = PlainDdp.functions()["finish_gradient_synchronization"]
"""


def test_code_that_lacks_optional_functions_is_judged_by_situations_without_them(worlds, mine):
    clause = clause_named("ddp.programs.any-situation")
    case = {"world": 2, "subject": "ddp", "situation": 0}
    found = runner.run_case(clause, mine(DDP_ALONE), case, worlds, transport="sim")
    assert found.outcome is Outcome.PASSED
