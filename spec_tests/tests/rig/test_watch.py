"""`trainspec watch`: right scripts are left alone, faults are named, nothing is changed."""

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests.tests.rig.helpers import ROOT, python
from spec_tests.tests.rig.watched import SCRIPTS, find
from spec_tests.tests.rig.watched.trial import Outcome, run
from spec_tests.watch import numbers, replayed
from spec_tests.watch.agent import Agent
from spec_tests.watch.command import norms, parse
from spec_tests.watch.norm import Finding
from spec_tests.watch.run import Event, Rank, Run, Step
from spec_tests.watch.verdict import Verdict, causes_of, headline, render

RIGHT = [name for name in SCRIPTS if name != "libraries"]  # needs a library that CI has not
# Without the watcher as well, to compare bits: one each for DDP, FSDP2, compiled code and dropout.
COMPARED = ("nanogpt", "fsdp2_mixed", "scaler", "freezing")


def shown(outcome: Outcome) -> str:
    return f"{render(outcome.verdict)}\nstatus {outcome.status}\n{outcome.output[-3000:]}"


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_script_is_left_alone(name: str):
    outcome = run(find(name), 2, "--steps", "3", options=("--replay", "2"))
    assert (outcome.verdict.causes, outcome.status) == ([], 0), shown(outcome)
    assert outcome.verdict.steps >= 2
    assert not any(" failed" in each for each in outcome.verdict.unseen), shown(outcome)
    if name in COMPARED:
        bare = run(find(name), 2, "--steps", "3", is_watched=False)
        assert outcome.fingerprints == bare.fingerprints, "the watcher changed the script's bits"
        assert len(bare.fingerprints) == 2


# ------------------------------------------------------------------------------ from the command on

TRAIN = """
    import os, sys
    import torch
    from torch import nn
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        loss = model(torch.randn(8, 4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("trained")
"""


def watch(*words: str, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """Run the command; returns its exit status and all that it printed."""
    ended = python("-m", "spec_tests", "watch", *words, cwd=cwd, **environment)
    return ended.returncode, ended.stdout + ended.stderr


def script(folder: Path, text: str = TRAIN, more: str = "") -> str:
    path = folder / "train.py"
    path.write_text(textwrap.dedent(text) + textwrap.dedent(more))
    return str(path)


def test_torchrun_with_a_report(tmp_path: Path):
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    words = ("--steps", "2", "--replay", "1", "--report", str(tmp_path / "out"), "--", *launch)
    status, output = watch(*words, str(find("by_hand")), "--steps", "50")
    assert status == 0, output
    assert "nothing wrong in 2 steps of 2 ranks; step 1 computed again" in output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["status"], report["ranks"], report["steps"]) == (0, 2, 2)
    assert "<svg" in (tmp_path / "out" / "index.html").read_text()


ASKED = TRAIN.replace("import os, sys", "import os, sys, importlib.util")
# As a library does to learn whether it is installed.
ASKED = ASKED.replace("import torch\n", 'importlib.util.find_spec("torch"); import torch\n', 1)
SPAWNED = """
    import os, torch, torch.distributed as dist

    def work(rank, store):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=1)
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        raise KeyError("label")

    if __name__ == "__main__":
        torch.multiprocessing.spawn(work, args=(os.path.abspath("store"),), nprocs=1)
"""


def test_an_error_of_a_spawned_rank_is_seen_from_the_command_on(tmp_path: Path):
    status, output = watch("--", sys.executable, script(tmp_path, SPAWNED), cwd=tmp_path)
    said = ("rank 0: expected it to end, got KeyError: 'label'", "at train.py:11")
    assert (status, [words for words in said if words not in output]) == (1, []), output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--",), "expected a command after --"),
        (("--", "no-such-command"), "expected a command that can be run"),
        (("--steps", "0", "--", "true"), "expected a number from 1 on"),
        (("--", sys.executable, "-c", "import torch"), "neither a training forward"),
    ],
)
def test_what_cannot_be_judged_is_said(words: tuple[str, ...], said: str):
    status, output = watch(*words)
    assert (status, said in output) == (2, True), output


def test_forks_threads_and_what_is_the_user_s_own_are_left_alone(tmp_path: Path):
    """A sitecustomize and a status of their own; torch is looked for before it is imported."""
    (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['MINE'] = 'here'\n")
    more = """
        import threading
        assert os.environ["MINE"] == "here"
        thread = threading.Thread(target=lambda: model(torch.randn(2, 4)).sum().backward())
        thread.start()
        thread.join()
        child = os.fork()
        if child == 0:
            model(torch.randn(2, 4))
            optimizer.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        sys.exit(7)
    """
    path = script(tmp_path, ASKED, more)
    status, output = watch("--", sys.executable, path, PYTHONPATH=str(tmp_path))
    said = ("watching 1 rank of train.py", "trained", "nothing wrong in 4 steps of 1 rank")
    assert (status, [words for words in said if words not in output]) == (7, []), output


# ------------------------------------------------------------------------- what single checks tell


def clipped(name: str, kind: str, norm: float) -> Event:
    """What a rank tells of a step with one parameter that was clipped, in what matters here."""
    entry = {"name": name, "kind": kind, "shape": [2], "ranks": [], "shard": [], "is_added": False}
    clip = {"parts": [[norm, kind, []]], "kind": 2.0, "max": 1.0, "partial": 0, "place": "it.py:1"}
    return {"clip": clip, "layout": [entry], "grads": ["same"], "place": "it.py:2"}


def test_gradients_that_are_no_replicas_may_differ_when_they_are_clipped():
    likely = {}
    for name, kind in (("a", "plain"), ("b", "plain"), ("a", "tensor"), ("a", "sharded")):
        seen = {0: clipped(name, kind, 4.0), 1: clipped("a", "plain", 2.0)}
        likely[name, kind] = [each.likely for each in numbers.clip_norm(Step(Run(), 0, 2, seen))]
    told = likely.pop(("a", "plain"))
    assert told == ["gradients are clipped before they are reduced"]
    assert [*likely.values()] == [[], [], []]


# ------------------------------------------------------------------------------------------ verdict


def finding(norm: str, step: int = 1) -> Finding:
    return Finding(norm, f"rank 1: expected, got {norm}", step)


def test_causes_and_their_effects():
    gradients, replicas = finding("watch.gradients.equal"), finding("watch.replicas.equal")
    (cause,) = causes_of([replicas, gradients, finding("watch.replicas.equal", 2)])
    assert (cause.finding, cause.effects) == (gradients, ["watch.replicas.equal"])
    later = finding("watch.steps.same", 3)  # what came before the cause is one of its own
    assert [each.finding for each in causes_of([replicas, later])] == [later, replicas]
    advice = finding("watch.reduction.saved")  # it explains no fault and comes last
    assert [each.finding for each in causes_of([advice, replicas])] == [replicas, advice]
    for norm in norms():
        assert [cause.finding.norm for cause in causes_of([finding(norm.id)])] == [norm.id]


def test_the_screen_has_at_most_forty_lines():
    causes = causes_of([finding(norm.id) for norm in norms()])
    verdict = Verdict(1, causes, 5, 2, [f"note {n}" for n in range(50)])
    assert len(render(verdict).splitlines()) <= 40


def test_the_headline_claims_no_more_than_was_seen():
    both = causes_of([finding("watch.steps.same"), finding("watch.reduction.saved")])
    told = [
        headline(Verdict(status, causes, steps, 2, []))
        for status, causes, steps in ((1, both, 5), (1, both[1:], 5), (0, [], 1), (2, [], 0))
    ]
    advice = "in 5 steps of 2 ranks; 1 finding is advice"
    assert told[:2] == [f"1 cause {advice}", f"no MUST is broken {advice}"]
    assert told[2:] == ["nothing wrong in 1 step of 2 ranks", "nothing was judged"]


@pytest.mark.parametrize(
    ("done", "own", "status", "words"),
    [
        ((True, True), 3, 3, "--steps ended its ranks"),  # `torchrun ...; exit 3`
        ((True, False), 3, 0, "--steps ended its ranks"),  # the other one failed without it
        ((True, True), 0, 0, "ended with 0"),
        ((False, False), -9, 137, ""),
    ],
)
def test_what_steps_ended_is_not_the_command_s_own_end(done, own, status, words):
    agent = Agent(parse(["--steps", "2"])[0], "")
    agent.run.ranks = {rank: Rank(rank, is_done=is_done) for rank, is_done in enumerate(done)}
    agent.findings, agent._went_on = [finding("watch.run.ends")], 1  # it was started again then
    (cause,) = agent.verdict(own).causes
    assert agent.exit_status(own) == status
    assert cause.finding.likely == ("the command went on and " + words) * bool(words)


# ----------------------------------------------------------------------------------- computed again


MEAN_TIMES = {
    "equal, but for a norm that was rounded": (lambda rank: 1 + 1e-5, "ddp", False, ""),
    "sum": (lambda rank: 2, "ddp", False, "got 2.000 x it in every element"),
    "sum of means": (lambda rank: 2, "plain", True, "got 2.000 x it in every element"),
    "the loss may be halved": (lambda rank: 2, "plain", False, "uncertain"),
    "clipped by hand, perhaps": (lambda rank: 0.3, "ddp", False, "uncertain"),
    "so too, near to a half": (lambda rank: 0.498, "ddp", False, "uncertain"),
    "by rank": (lambda rank: 0.3 + 0.1 * rank, "ddp", False, "a number of its own"),
    "no cause fits": (lambda rank: torch.rand(50) + 0.5, "ddp", False, "uncertain"),
    "zeros": (lambda rank: 0, "ddp", False, "got zeros"),
}
"""What a rank has in place of the mean, of which kind, whether losses are means; what is said."""


@pytest.mark.parametrize(("factor", "kind", "is_mean", "said"), MEAN_TIMES.values(), ids=MEAN_TIMES)
def test_gradients_against_what_was_computed_again(
    tmp_path: Path, factor: Callable[[int], Any], kind: str, is_mean: bool, said: str
):
    torch.manual_seed(0)
    own = [torch.randn(50, dtype=torch.float64) for _ in range(2)]
    mean, files = (own[0] + own[1]) / 2, [tmp_path / "0.pt", tmp_path / "1.pt"]
    for rank, file in enumerate(files):
        expected = {name: (own[rank], own[rank].abs()) for name in ("a", "b")}
        actual = {name: (mean * factor(rank)).float() for name in ("a", "b")}
        parts = dict.fromkeys(("a", "b"), (kind, None))
        torch.save({"expected": expected, "actual": actual, "parts": parts}, file)
    found = replayed.judge(files, 1, is_mean)
    words = "".join(each.words if each.is_certain else "uncertain" for each in found[:1])
    assert said in words
    assert bool(said) == bool(found)
