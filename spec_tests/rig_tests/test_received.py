"""What a rank sends is data to its parent: all that is data arrives, and nothing else is called."""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_tests.rig.judge import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.errors import RankRaised, RankReport
from spec_tests.rig.ranks.rank import Context, Reply
from spec_tests.rig.ranks.recorder import Kind
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig_tests import bodies

ELSEWHERE = """
import collections, pathlib
class Steps(int): pass
class Trap(int):
    def __reduce__(self): return pathlib.Path.touch, (pathlib.Path({witness!r}),)
class Nested(int):
    def __reduce__(self): return (collections.OrderedDict, ([("a", Trap())],))
class Word(str):
    def __reduce__(self): return Trap().__reduce__()
class Named(ValueError):
    def __str__(self): return Word("my words")
def ddp(module):
    {statement}
"""


def fail_without_words(ctx: Context) -> None:
    assert ctx.rank == 2


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        (
            "return Steps(3)",
            r"rank 0 of 1: expected plain data, got what only trainspec_impl_mine\.Steps can",
        ),
        ("return Trap(3)", r"got what only pathlib\.\w*Path"),
        ("return [{'a': Nested(3)}]", r"got what only pathlib\.\w*Path"),
        ("return len", r"got what only builtins\.(len|getattr) can rebuild"),
        ("return torch.nn.Linear(1, 1)", r"got what only torch\.nn\.modules\.linear\.Linear can"),
        ("return rank._resolve", r"got what only spec_tests\.rig\.ranks\.rank\._resolve can"),
        ("raise Named()", "raised Named: my words"),
    ],
    ids=["class", "calls", "nested", "builtin", "torch", "suite", "words"],
)
def test_what_is_more_than_data_is_refused_and_never_called_in_the_parent(
    worlds: Worlds, tmp_path: Path, mine, statement: str, said: str
):
    witness = tmp_path / "ran"
    text = ELSEWHERE.format(witness=str(witness), statement=statement)
    which = mine("import torch\nfrom spec_tests.rig.ranks import rank\n" + text)
    with pytest.raises(RankRaised, match=said) as caught:
        worlds.world(1, which).run(bodies.call_ddp)
    assert runner.outcome_of(caught.value) is Outcome.FAILED
    assert str(caught.value.error.message) in runner.message_of(caught.value)
    assert not witness.exists()
    worlds.drop(which)


@pytest.mark.parametrize(
    "value",
    [
        *(1, 1.5, 1j, True, None, "x", b"x", bytearray(b"x"), (1, [2]), {3}, frozenset({4})),
        *(range(5), slice(1, 2), collections.OrderedDict(a=1), collections.defaultdict(int, a=1)),
        *(collections.deque([1]), collections.Counter("aab"), ValueError("words")),
        *(torch.float8_e4m3fn, torch.Size([2, 3]), torch.device("cuda:1")),
        *(np.int64(3), np.float32(0.5), np.dtype("int16")),
        *([np.zeros((2, 3)), np.arange(6)[::2]], Kind.GATHER, RankReport(1, "returned")),
    ],
    ids=lambda value: f"{type(value).__name__}",
)
def test_all_that_is_data_is_read_as_it_was_sent(value: object):
    back = wire.received(wire.dumps({"a": [value]}), dict)["a"][0]
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_bytes_that_are_no_answer_are_refused_as_what_they_are():
    for data, said in {
        b"": "cannot be read: EOFError",
        b"nonsense": "cannot be read: ",
        wire.dumps(3): "expected a Reply, got int",
        pickle.dumps(os.system): r"only posix\.system can rebuild",
        b"cspec_tests.rig.ranks.pool\nos.system\n.": r"only spec_tests\.rig\.ranks\.pool\.os\.",
    }.items():
        with pytest.raises(wire.NotPlain, match=said):
            wire.received(data, Reply)


def test_an_assertion_without_words_arrives_with_its_line(worlds: Worlds):
    with pytest.raises(RankRaised) as caught:
        worlds.world(2).run(fail_without_words)
    line = fail_without_words.__code__.co_firstlineno + 1
    assert caught.value.headline == (
        f"rank 0 and 1 of 2 raised AssertionError at {__file__}:{line}: assert ctx.rank == 2"
    )
    assert not caught.value.error.message, "who refuses still has to say so in words"
