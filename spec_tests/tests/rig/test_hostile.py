"""An implementation is untrusted code: what it does to itself, it does to itself alone.

Each file here does one thing that would end or mislead a suite that imported it: the outcome is a
result with a message. What a rank sends is data to its parent: all that is data arrives, and
nothing else is called. That others are judged as ever beside such code: `test_what_code_comes_to`.
"""

from __future__ import annotations

import collections
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from spec_tests.rig import judge
from spec_tests.rig.judge import runner
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks import member, wire, world
from spec_tests.rig.ranks.errors import RankDied, RankHung, RankRaised, RankReport, RigError
from spec_tests.rig.ranks.rank import Context, RankConfig, Reply
from spec_tests.rig.ranks.recorder import Kind
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig import bodies, test_hygiene
from spec_tests.tests.rig.helpers import RIGHT, RIGHT_BESIDE, UNANSWERED, calling, judged

CRASH = "import ctypes; ctypes.string_at(0)"


# ------------------------------------------------------------------------------- while it is called


def test_what_floods_without_end_is_a_hang_with_its_stack_and_spares_the_disk(
    own: Worlds, mine, monkeypatch
):
    monkeypatch.setattr(member, "_OUTPUT_BYTES", 2**14)
    flood = mine(calling("while True: os.write(1, b'on and on\\n' * 2**13)"))
    own.world(1, flood).run(bodies.empty)
    with pytest.raises(RankHung) as caught:
        own.world(1, flood).run(bodies.call_ddp, 0, timeout_s=0.5)
    assert "while True: os.write" in str(caught.value) or UNANSWERED in str(caught.value)
    assert " bytes before this were dropped)" in str(caught.value)


def test_patience_wears_out_with_the_function_that_computes_without_end(own: Worlds, mine):
    endless = mine(calling("while True: pass"))
    own.world(1, endless).run(bodies.empty)
    with judge.judging(judge.Situation(subject="ddp")):
        with pytest.raises(RankHung, match="still computing after 2 s") as caught:
            own.world(1, endless).run(bodies.call_ddp, 0, timeout_s=0.5)
        assert "line 4, in ddp" in caught.value.ranks[0].stack
        patience = []
        for _ in range(7):
            patience.append(own.patience(endless))
            own.note(endless, RankHung("hang: rank 0 blocked, nothing moved for 2 s", 0))
            own.note(endless, caught.value)
        assert patience == [2.0, 1.0, 0.5, 0.25, 0.125, 0.125, 0.125]
        assert own.patience(RIGHT_BESIDE) == 4.0, "nobody else has used any of it up"
    with judge.judging(judge.Situation(subject="sharded_optimizer")):
        assert own.patience(endless) == 1.0, "another function of it has its limit, and no more"


def test_a_huge_observation_is_refused_where_it_is_made(own: Worlds, mine):
    huge = mine(calling("return torch.zeros(65 * 2**20, dtype=torch.uint8)"))
    with pytest.raises(Exception, match="expected observations of at most 64 MB, got 65 MB"):
        own.world(1, huge).run(bodies.call_ddp, 0)


# ----------------------------------------------------------------------------- while it is imported


@pytest.mark.parametrize(
    ("text", "said", "limit_s"),
    [
        ("import os\nos._exit(0)\n", "exited with 0 while it imported the implementation", 60.0),
        (CRASH, "killed by SIGSEGV while it imported the implementation", 60.0),
        ("import time\ntime.sleep(99)\n", "the implementation does not end", 1.5),
        ("while True:\n    print('x' * 2**16)\n", "the implementation does not end", 1.5),
    ],
    ids=["ends the process", "crashes", "sleeps", "floods"],
)
def test_what_never_loads_is_said_once_and_not_tried_for_every_clause(
    own: Worlds, mine, monkeypatch, text: str, said: str, limit_s: float
):
    monkeypatch.setattr(member, "START_TIMEOUT_S", limit_s)
    monkeypatch.setattr(member, "_OUTPUT_BYTES", 2**20)
    if limit_s < 60.0:
        monkeypatch.setattr(world, "_STARTS", 1)
    started: list[RankConfig] = []
    start = member.start

    def counted(config: RankConfig) -> member.Member:
        started.append(config)
        return start(config)

    monkeypatch.setattr(member, "start", counted)
    broken = mine(text)
    with pytest.raises((RankDied, RankHung)) as caught:  # how the command asks, before all clauses
        own.pool(2, broken, "gloo")
    assert said in str(caught.value)
    assert started
    found = [judged(broken, own)]  # another start at most
    tried = len(started)
    found += [judged(broken, own) for _ in range(2)]
    assert len(started) == tried, "remembered"
    assert [f.outcome for f in found] == [Outcome.ERROR] * 3
    assert f"{broken.name} does not load: " in found[2].message
    assert said in found[2].message
    with pytest.raises(RigError, match="does not load"):
        own.world(2, broken).offered()


MEDDLER = """
import os, torch
import torch.distributed as dist
torch.set_default_dtype(torch.float16)
os.environ.update(RANK="5", WORLD_SIZE="9", OMP_NUM_THREADS="64")
os.chdir("/")
dist.init_process_group = dist.destroy_process_group = lambda *args, **kwargs: None
dist.is_initialized = lambda: True
dist.barrier = lambda *args, **kwargs: 1 / 0
_print = print
def print(*args): _print("meddled", *args)
torch.Tensor.norm = lambda *args: 1 / 0
"""


def test_global_state_is_put_back_and_what_was_replaced_is_told(
    own: Worlds, module_worlds: Worlds, mine
):
    meddler = mine(MEDDLER + RIGHT)
    meddled = own.world(2, meddler).run(test_hygiene.state)
    assert meddled == module_worlds.world(2, RIGHT_BESIDE).run(test_hygiene.state)
    assert judged(meddler, own).outcome == Outcome.PASSED
    said = "\n".join(own.leaks)
    assert "rank 0, at import: default dtype: torch.float32 -> torch.float16 (restored)" in said
    assert "rank 1, at import: replaced torch.distributed.init_process_group" in said
    assert "replaced torch.Tensor.norm" in said


def test_a_group_of_its_own_is_left_before_the_rig_makes_one(own: Worlds, mine):
    text = (
        "import os, tempfile, torch.distributed as dist\n"
        "place = tempfile.mkdtemp()\n"
        "dist.init_process_group('gloo', init_method=f'file://{place}/s', rank=0, world_size=1)\n"
    )
    assert judged(mine(text + RIGHT), own).outcome == Outcome.PASSED


# ------------------------------------------------------------------------------- what a rank sends


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
        ("return Steps(3)", r"rank 0 of 1: expected plain data, got .*_impl_mine\.Steps can"),
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
