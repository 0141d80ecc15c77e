"""What an implementation does not offer passes nothing, however late it says so.

And right code that is unusual passes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from spec_tests import impls
from spec_tests.chapters.data import test_state
from spec_tests.contract import FUNCTIONS, OPTIONAL_METHODS
from spec_tests.programs import draw, law
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import SILENT, Outcome
from spec_tests.rig.ranks.errors import NotOffered
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig.helpers import clauses, judged

# Its functions are not seen to be left open: they look like functions that do something.
OPEN = """
def not_yet(*args, **kwargs):
    raise NotImplementedError("not yet")

""" + "".join(f"def {name}(*args, **kwargs):\n    return not_yet()\n\n" for name in FUNCTIONS)

WITHOUT_A_FLAG = """
import torch

def clip_grad_norm_(parameters, max_norm, norm_type=2.0, *, error_if_nonfinite=False):
    if error_if_nonfinite:
        raise NotImplementedError("error_if_nonfinite")
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
"""

FORWARD = """
import torch

class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, causal):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

def flash_attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    return Attention.apply(q, k, v, causal)
"""
LEFT_OPEN = """
def backward(ctx, *gradients):
    raise NotImplementedError("the backward is the next exercise")

Attention.backward = staticmethod(backward)
"""


@pytest.fixture(scope="module")
def simulated() -> Iterator[Worlds]:
    """Worlds of simulated ranks, which take a third of the time."""
    worlds = Worlds(transport="sim")
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the implementations lie; the chapters share one, and so its ranks."""
    return tmp_path_factory.mktemp("not_offered")


def outcomes(
    worlds: Worlds, simulated: Worlds, file: Path, text: str, chosen: str
) -> dict[str, Outcome]:
    """Clause to the outcome of its smallest case, on simulated ranks where it can.

    Of the functions that a clause judges the first has the first clause, the second the next.
    """
    file.write_text(text, encoding="utf-8")
    implementation = impls.parse(str(file))
    found = {}
    for number, clause in enumerate(load_all()):
        if clause.id.startswith(chosen) and "gloo" in clause.transports:
            ranks = simulated if "sim" in clause.transports else worlds
            case = of_one(clause.judges, number)
            found[clause.id] = judged(implementation, ranks, clause, case).outcome
    return found


def of_one(subjects: Sequence[str], number: int) -> dict[str, str]:
    """What a case has that is of one of these functions: by the number, so that all have some."""
    return {"subject": subjects[number % len(subjects)]} if subjects else {}


@pytest.mark.parametrize("chapter", sorted({clause.chapter for clause in load_all()}))
def test_what_refuses_every_call_is_offered_nowhere(
    worlds: Worlds, simulated: Worlds, folder: Path, chapter: str
):
    found = outcomes(worlds, simulated, folder / "open.py", OPEN, f"{chapter}.")
    assert {name: outcome for name, outcome in found.items() if outcome not in SILENT} == {}


def test_a_keyword_that_is_not_offered_passes_no_clause_about_it(
    worlds: Worlds, simulated: Worlds, folder: Path
):
    found = outcomes(worlds, simulated, folder / "clip.py", WITHOUT_A_FLAG, "clip.nonfinite.")
    assert {name for name, outcome in found.items() if outcome is Outcome.NOT_OFFERED} == {
        "clip.nonfinite.error-on-all-ranks",
        "clip.nonfinite.error-scales-nothing",
        "clip.nonfinite.finite-is-no-error",
    }


@pytest.mark.parametrize("backward", ["", LEFT_OPEN], ids=["left out", "left open"])
def test_without_a_backward_no_clause_about_it_passes(worlds: Worlds, folder: Path, backward: str):
    (file := folder / f"forward{len(backward)}.py").write_text(FORWARD + backward)
    for clause in load_all():
        if clause.id.startswith(("attention.autograd.", "attention.shapes.without-heads")):
            found = judged(impls.parse(str(file)), worlds, clause, {"subject": "flash_attention"})
            assert found.outcome is not Outcome.PASSED, clause.id
    found = judged(impls.parse(str(file)), worlds, "attention.forward.values")
    assert found.outcome is Outcome.PASSED, found.message


# Right code whose object lacks every method that it may lack.
LACKING = """
from spec_tests.plain import *

class Lacking:
    def __getattribute__(self, name):
        if name in {methods}:
            raise AttributeError(f"no {{name}}")
        return super().__getattribute__(name)

def without(make):
    def lacking(*args, **kwargs):
        made = make(*args, **kwargs)
        made.__class__ = type(type(made).__name__, (Lacking, type(made)), {{}})
        return made
    return lacking
"""
TRAINERS = ("build_trainer", "build_zero1_trainer", "build_fsdp_trainer")


def lacking(*names: str, methods: Sequence[str] = ()) -> str:
    """An implementation of these functions, whose objects lack what they may, or these methods."""
    text = LACKING.format(methods=(*(methods or OPTIONAL_METHODS[names[0]]),))
    return text + "".join(f"{name} = without({name})\n" for name in names)


@pytest.mark.parametrize(
    ("chapter", "names"),
    [
        ("data", ("token_loader",)),
        ("zero1", ("sharded_optimizer",)),
        ("fsdp", ("fully_shard",)),
        ("trainer", TRAINERS),
    ],
)
def test_a_method_that_an_object_may_lack_is_not_offered(
    worlds: Worlds, simulated: Worlds, mine, chapter: str, names: tuple[str, ...]
):
    which, found = mine(lacking(*names)), {}
    for number, clause in enumerate(clauses(chapter, "correct")):
        own = [name for name in names if name in clause.judges]
        if own or {*names} & {*clause.needs}:
            ranks = simulated if "sim" in clause.transports else worlds
            found[clause.id] = judged(which, ranks, clause, of_one(own, number))
    others = {i: r.message for i, r in found.items() if r.outcome not in SILENT | {Outcome.PASSED}}
    assert others == {}
    lacks = {i: r.message for i, r in found.items() if r.outcome is Outcome.NOT_OFFERED}
    # Trainers of shards lack a clause besides: they begin with equal weights.
    says = [re.search(r"not offered: \w+\.\w+\(\)|no \w+\(\)", m) for m in lacks.values()]
    assert any(says)
    assert all(says) or chapter == "trainer"


@pytest.mark.parametrize(
    ("clause", "case", "method"),
    [
        ("fsdp.traffic.copies-per-step", {}, "set_requires_gradient_sync"),
        ("fsdp.traffic.copies-per-step", {}, "set_reshard_after_backward"),
        ("fsdp.lifecycle.hybrid-of-one", {}, "set_requires_gradient_sync"),
        (
            "fsdp.backward.post-accumulate-hooks",
            {"first": "backward"},
            "set_requires_gradient_sync",
        ),
        ("fsdp.precision.reduces-in-its-dtype", {}, "set_requires_gradient_sync"),
    ],
)
def test_a_clause_that_does_not_speak_of_an_absent_method_is_judged(
    simulated: Worlds, mine, clause: str, case: dict[str, str], method: str
):
    which = mine(lacking("fully_shard", methods=(method,)))
    found = judged(which, simulated, clause, {"subject": "fully_shard", **case})
    assert found.outcome is Outcome.PASSED, found.message


def test_a_setting_of_a_scene_that_is_absent_is_not_offered(simulated: Worlds, mine):
    which = mine(lacking("fully_shard", methods=("set_gradient_divide_factor",)))
    with pytest.raises(NotOffered, match="set_gradient_divide_factor"):
        law.same_as_alone(simulated.world(2, which), "fully_shard", "by-four: backward 0")


@pytest.mark.parametrize("needed", ["keep", ""], ids=["by some", "by all"])
def test_drawn_situations_that_need_an_absent_method_hide_no_others(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, needed: str
):
    judged_lines = []

    def same_as_alone(world, subject, line, *, looks):
        if needed in line:
            raise NotOffered("no set_reshard_after_backward()")
        judged_lines.append(line)

    monkeypatch.setattr(law, "same_as_alone", same_as_alone)
    world, known = worlds.world(2, impls.parse("plain")), len(worlds.leaks)
    with contextlib.nullcontext() if needed else pytest.raises(NotOffered):
        draw.judge_part(world, "fully_shard", "correct", 0)
    assert bool(judged_lines) == bool(needed)
    left_out = "notice: situations that need it were left out: no set_reshard_after_backward()"
    assert worlds.leaks[known:] == [left_out] * bool(needed)


@pytest.mark.parametrize(
    ("line", "outcome"),
    [
        ("return loader", Outcome.NOT_OFFERED),
        ("return None", Outcome.FAILED),
        ("return loader.state_dict()", Outcome.FAILED),
    ],
    ids=["lacks it", "returns nothing", "asks itself"],
)
def test_only_a_clause_that_asks_an_object_finds_a_method_absent(
    worlds: Worlds, mine, line: str, outcome: Outcome
):
    text = lacking("token_loader").replace("token_loader = without", "lacking = without")
    text += "def token_loader(*args, **kwargs):\n    loader = lacking(*args, **kwargs)\n    "
    which = mine(text + line)
    found = judged(which, worlds, test_state.test_a_stopped_pass_goes_on_with_the_next_batch)
    assert found.outcome is outcome, found.message


# As public loaders do it: a quantum of tokens at a time, the rest of a shard dropped, and no end.
# A shard that is shorter than the quantum gives a batch of the wrong size, which is an error here.
QUANTA = """
import numpy as np
import torch

class Quanta:
    def __init__(self, paths, B, T, rank, world):
        self.files = [np.fromfile(path, np.uint16, offset=1024).astype(np.int64) for path in paths]
        self.shape, self.first, self.quantum = (B, T), rank * B * T, world * B * T

    def __iter__(self):
        file, begin = 0, 0
        while True:
            if begin + self.quantum + 1 >= len(self.files[file]):
                file, begin = (file + 1) % len(self.files), 0
            B, T = self.shape
            tokens = torch.tensor(self.files[file][begin + self.first :][: B * T + 1])
            yield tokens[:-1].view(self.shape), tokens[1:].view(self.shape)
            begin += self.quantum

def token_loader(paths, *, batch_size, sequence_length, rank=None, world_size=None):
    return Quanta(paths, batch_size, sequence_length, rank or 0, world_size or 1)
"""


def test_clauses_on_states_ask_for_a_state_first(worlds: Worlds, simulated: Worlds, folder: Path):
    found = outcomes(worlds, simulated, folder / "quanta.py", QUANTA, "data.state.")
    assert {*found.values()} == {Outcome.NOT_OFFERED}


def test_a_further_pass_repeats_no_sequence(worlds: Worlds, mine):
    which = mine(QUANTA)
    for name, outcome in (
        ("ranks-differ", Outcome.PASSED),
        ("one-pass-per-iter", Outcome.FAILED),
        ("short-shards", Outcome.FAILED),
    ):
        assert judged(which, worlds, f"data.partition.{name}").outcome is outcome, name
