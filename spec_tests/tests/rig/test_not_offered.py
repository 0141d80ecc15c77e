"""What an implementation does not offer passes nothing, however late it says so.

And right code that is unusual passes.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import pytest

from spec_tests import impls
from spec_tests.chapters.data import test_state
from spec_tests.contract import FUNCTIONS, OPTIONAL_METHODS
from spec_tests.programs import draw, law
from spec_tests.rig.judge import Situation, judging
from spec_tests.rig.judge.runner import CaseResult
from spec_tests.rig.ledger import load_all
from spec_tests.rig.outcomes import LEVELS, SILENT, Outcome
from spec_tests.rig.ranks.errors import NotOffered
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import Target
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


@pytest.fixture(scope="module", name="worlds")
def roomy() -> Iterator[Worlds]:
    """Worlds in which live and simulated ranks of every size stay from clause to clause."""
    worlds = Worlds(max_pools=12)
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where an implementation lies that the chapters share, and so its ranks."""
    return tmp_path_factory.mktemp("not_offered")


def results(
    worlds: Worlds,
    which: Target,
    chosen: str,
    names: Collection[str] = FUNCTIONS,
    level: str = LEVELS[-1],
) -> dict[str, CaseResult]:
    """Clause on these functions to what its smallest case came to, on simulated ranks if it can.

    Of the functions that a clause judges the first has the first clause, the second the next, so
    that all have some. Drawn situations are left out: they take longest, and make calls that other
    clauses make.
    """
    found = {}
    for number, clause in enumerate(clauses(chosen.partition(".")[0], level)):
        own = [name for name in clause.judges if name in names]
        is_drawn = ".programs." in clause.id
        if (
            clause.id.startswith(chosen)
            and not is_drawn
            and (own or not {*names}.isdisjoint(clause.needs))
        ):
            case = {"subject": own[number % len(own)]} if own else {}
            transport = "sim" if "sim" in clause.transports else "gloo"
            found[clause.id] = judged(which, worlds, clause, case, transport=transport)
    return found


@pytest.mark.parametrize("chapter", sorted({clause.chapter for clause in load_all()}))
def test_what_refuses_every_call_is_offered_nowhere(worlds: Worlds, folder: Path, chapter: str):
    (file := folder / "open.py").write_text(OPEN, encoding="utf-8")
    found = results(worlds, impls.parse(str(file)), f"{chapter}.")
    assert {i: r.outcome for i, r in found.items() if r.outcome not in SILENT} == {}


def test_a_keyword_that_is_not_offered_passes_no_clause_about_it(worlds: Worlds, mine):
    found = results(worlds, mine(WITHOUT_A_FLAG), "clip.nonfinite.")
    assert {i for i, r in found.items() if r.outcome is Outcome.NOT_OFFERED} == {
        "clip.nonfinite.error-on-all-ranks",
        "clip.nonfinite.error-scales-nothing",
        "clip.nonfinite.finite-is-no-error",
    }


@pytest.mark.parametrize("backward", ["", LEFT_OPEN], ids=["left out", "left open"])
def test_without_a_backward_no_clause_about_it_passes(worlds: Worlds, mine, backward: str):
    which = mine(FORWARD + backward)
    for chosen in ("attention.autograd.", "attention.shapes.without-heads"):
        for id, found in results(worlds, which, chosen, ["flash_attention"]).items():
            assert found.outcome is not Outcome.PASSED, id
    found = judged(which, worlds, "attention.forward.values")
    assert found.outcome is Outcome.PASSED, found.message


WITHOUT_LSE = """
from spec_tests.plain import flash_attention as plain

def flash_attention(q, k, v, *, causal=False, scale=None, return_lse=False):
    if return_lse:
        raise NotImplementedError("no log-sum-exp")
    return plain(q, {keys}, v, causal=causal, scale=scale)
"""
BY_STRIDES_OF_V = "k.as_strided(k.shape, v.stride()) if k.stride() != v.stride() else k"


def test_attention_that_returns_no_log_sum_exp_is_judged_in_all_else(worlds: Worlds, mine):
    # 29 clauses asked for all of O, L and gradients in one call, and so judged nothing.
    which, case = mine(WITHOUT_LSE.format(keys="k")), {"subject": "flash_attention"}
    whole = judged(impls.parse("plain"), worlds, "attention.gradients.values", case)
    assert whole.outcome is Outcome.PASSED, "who returns it is asked for all in one"
    names = ("gradients.values", "layout.strides", "laws.powers-of-two", "blind-rows.zeros")
    for id in (*names, "shapes.empty"):
        found = judged(which, worlds, f"attention.{id}", case)
        assert found.outcome is Outcome.PASSED, found.message
    for id in ("forward.lse", "laws.doubled-keys"):
        assert judged(which, worlds, f"attention.{id}", case).outcome is Outcome.NOT_OFFERED, id
    worlds.drop(which)
    wrong = mine(WITHOUT_LSE.format(keys=BY_STRIDES_OF_V))
    found = judged(wrong, worlds, "attention.layout.strides", case | {"layout": "only-k"})
    assert found.outcome is Outcome.FAILED, found.message


def test_attention_that_is_always_causal_is_judged_with_its_gradients(worlds: Worlds, mine):
    # It was said that its backward is left open, for a call without a mask is not offered.
    which = mine(WITHOUT_LSE.format(keys="k").replace("return_lse:", "return_lse or not causal:"))
    case = {"subject": "flash_attention", "part": "backward"}
    found = judged(which, worlds, "attention.causal.equal-lengths", case)
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
    worlds: Worlds, mine, chapter: str, names: tuple[str, ...]
):
    found = results(worlds, mine(lacking(*names)), f"{chapter}.", names, "correct")
    others = {i: r.message for i, r in found.items() if r.outcome not in SILENT | {Outcome.PASSED}}
    assert others == {}
    lacks = {i: r.message for i, r in found.items() if r.outcome is Outcome.NOT_OFFERED}
    # Trainers of shards lack a clause besides: they begin with equal weights.
    says = [re.search(r"not offered: \w+\.\w+\(\)|no \w+\(\)", m) for m in lacks.values()]
    assert any(says)
    assert all(says) or chapter == "trainer"


# The trainers of a near-miss, or of right code, with one of the optimizers.
WITH_ONE = """
import torch
from spec_tests import impls, museum

def with_one(build):
    def built(module, make_optimizer, **options):
        if make_optimizer.cls is not torch.optim.{optimizer}:
            raise NotImplementedError("{optimizer} alone")
        return build(module, make_optimizer, **options)
    return built

below = museum.build("{card}", impls.parse("plain"))
""" + "".join(f"{name} = with_one(below.{name})\n" for name in TRAINERS)


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_trainer_with_one_optimizer_is_judged_with_it(worlds: Worlds, mine, optimizer: str):
    right = mine(WITH_ONE.format(optimizer=optimizer, card="control.reference"))
    found = results(worlds, right, "trainer.step.", TRAINERS, "correct")
    found |= results(worlds, right, "trainer.footprint.", TRAINERS, "correct")
    wrong = {i: r.message for i, r in found.items() if r.outcome not in SILENT | {Outcome.PASSED}}
    assert wrong == {}
    lacks = {i for i, r in found.items() if r.outcome is Outcome.NOT_OFFERED}
    assert lacks <= {"trainer.footprint.state-is-divided", "trainer.step.starts-from-first-rank"}
    faulty = mine(WITH_ONE.format(optimizer=optimizer, card="trainer.sums-ranks"), "faulty.py")
    sums = judged(faulty, worlds, "trainer.step.equals-one-process", {}, transport="sim")
    assert sums.outcome is Outcome.FAILED, sums.message


def test_no_other_optimizer_stands_in_where_torch_itself_lacks_something(worlds: Worlds, mine):
    text = WITH_ONE.format(optimizer="AdamW", card="control.reference")
    refusal = 'raise NotImplementedError("AdamW alone")'
    assert refusal in text
    which = mine(text.replace(refusal, "torch.nn.Module()(1)"))
    found = judged(which, worlds, "trainer.step.equals-one-process", {}, transport="sim")
    assert found.outcome is Outcome.FAILED, found.message


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
    worlds: Worlds, mine, clause: str, case: dict[str, str], method: str
):
    which = mine(lacking("fully_shard", methods=(method,)))
    case = {"subject": "fully_shard", **case}
    found = judged(which, worlds, clause, case, transport="sim")
    assert found.outcome is Outcome.PASSED, found.message


def test_a_setting_of_a_scene_that_is_absent_is_not_offered(worlds: Worlds, mine):
    which = mine(lacking("fully_shard", methods=("set_gradient_divide_factor",)))
    world = worlds.world(2, which, transport="sim")
    with pytest.raises(NotOffered, match="set_gradient_divide_factor"):
        law.same_as_alone(world, "fully_shard", "by-four: backward 0")


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
    raised = contextlib.nullcontext() if needed else pytest.raises(NotOffered)
    with judging(Situation()), raised:
        draw.judge_part(world, "fully_shard", 0, "correct")
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


# As public loaders do it: no end, and no state.
ENDLESS = """
from spec_tests import plain

class Endless:
    def __init__(self, *args, **options):
        self.loader = plain.token_loader(*args, **options)

    def __iter__(self):
        while True:
            yield from self.loader

def token_loader(*args, **options):
    return Endless(*args, **options)
"""


def test_clauses_on_states_ask_for_a_state_first(worlds: Worlds, mine):
    found = results(worlds, which := mine(ENDLESS), "data.state.")
    assert {result.outcome for result in found.values()} == {Outcome.NOT_OFFERED}
    goes_on = judged(which, worlds, "data.partition.ranks-differ")
    assert goes_on.outcome is Outcome.PASSED, "a further pass repeats no sequence"
