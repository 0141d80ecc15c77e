"""Watch a training command: start it with the probe in each rank, and judge what the ranks send.

    python -m spec_tests watch -- torchrun --standalone --nproc-per-node=2 train.py --steps 100
    python -m spec_tests watch --steps 5 --replay 3 --report outputs/watch -- torchrun ... train.py

Exit status: 1 a MUST does not hold; 2 nothing could be judged; else the command's own. On several
nodes, start each node's torchrun under a `watch` of its own: the one with rank 0 judges.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from spec_tests.rig.clause import Clause
from spec_tests.rig.report.text import several

# `data`, `numbers`, `reduction` and `replayed` register norms.
from spec_tests.watch import compare, data, numbers, reduction, replayed, seen, traffic  # noqa: F401
from spec_tests.watch.child import Child, handed_on
from spec_tests.watch.norm import NORMS, STEP_CHECKS, Finding, is_must
from spec_tests.watch.run import Rank, Run, Step
from spec_tests.watch.verdict import ORDER, Verdict, causes_of, render, write

BOOT = Path(__file__).parent / "boot"
_GRACE_SECONDS = 3.0
_MISMATCH_SECONDS = 2.0  # that ranks wait in collectives that do not match, until they are ended
_GONE_ON_SECONDS = 10.0  # after a mismatch: then it is not what the ranks wait for
_KEPT = 100  # findings of one norm
_RECORDS = "512"  # collectives that torch's flight recorder keeps: 6 ms to read


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options, command = parse(arguments)
    if not command:
        print(
            "expected a command after --, such as: watch -- torchrun ... train.py", file=sys.stderr
        )
        return 2
    if shutil.which(command[0]) is None:
        print(f"expected a command that can be run, got {command[0]!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="trainspec-watch-") as scratch:
        agent = Agent(options, scratch)
        own = agent.run_command(command)
        verdict = agent.verdict(own)
    print(render(verdict), flush=True)
    if options.report:
        write(verdict, agent.run, command, Path(options.report))
        print(f"report: {Path(options.report) / 'index.html'}")
    return verdict.status or (own if own >= 0 else 128 - own)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the command after "--"."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests watch",
        usage="%(prog)s [options] -- COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, help="end each rank after so many steps")
    parser.add_argument(
        "--replay", type=_positive, metavar="K", help="compute the gradients of step K again"
    )
    parser.add_argument("--report", metavar="DIR", help="write index.html and report.json")
    parser.add_argument(
        "--compare",
        type=compare.earlier,
        metavar="DIR",
        help="the report of another run of the script: say at which step and tensor they part",
    )
    parser.add_argument("--fail-fast", action="store_true", help="end at the first MUST that fails")
    parser.add_argument(
        "--patience", type=float, default=10, help="seconds without progress that are a hang (10)"
    )
    parser.add_argument(
        "--replicas",
        type=_ranks,
        action="append",
        default=[],
        metavar="R,R",
        help="ranks that hold the same parameters and train on different data, such as 0,2; once "
        "for each such group, where the ranks hold different parts of a model",
    )
    parser.add_argument("--strict", action="store_true", help="advice gives exit status 1 too")
    parser.add_argument("--host", default="", help="this node's address for ranks on other nodes")
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:cut]), given[cut + 1 :]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text}")
    return value


def _ranks(text: str) -> list[int]:
    try:
        return sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,2, got {text}") from None


def norms() -> list[Clause]:
    """Return every norm of a running script, causes before effects."""
    return list(NORMS.values())


class Agent:
    """Listens to the ranks of one command, and runs the checks as their events come."""

    def __init__(self, options: argparse.Namespace, scratch: str) -> None:
        self.run = Run(groups=options.replicas)
        self.findings: list[Finding] = []
        self.moved_to = ""
        self._options = options
        self._scratch = scratch
        self._token = secrets.token_hex(8)
        self._traffic = traffic.Traffic()
        self._selector = selectors.DefaultSelector()
        self._lines: dict[socket.socket, bytes] = {}
        self._ranks: dict[socket.socket, Rank] = {}
        self._hang: dict[int, tuple[int, ...]] = {}  # rank to how far it was when a hang was told
        self._was_stopped = False
        self._steps = self._ranks_seen = 0  # of runs that have ended
        self._went_on = 0  # findings that the command has gone on after
        self._script = ""
        self._is_announced = False

    def run_command(self, command: Sequence[str]) -> int:
        """Start the command, serve its ranks until it has ended; returns its exit status."""
        many = any("nnodes" in each and not each.endswith("=1") for each in command)
        with socket.create_server(("" if many else "127.0.0.1", 0)) as server:
            server.setblocking(False)
            host = self._options.host or (socket.gethostname() if many else "127.0.0.1")
            address = f"{host}:{server.getsockname()[1]}:{self._token}"
            self._selector.register(server, selectors.EVENT_READ)
            self._script = next((w for w in command if w.endswith(".py")), command[0])
            child = self.start(command, self._environment(address))
            try:
                with handed_on(child):
                    self._serve(server, child)
            except KeyboardInterrupt:
                child.stop(signal.SIGINT)
            finally:
                for each in list(self._lines):
                    self._close(each)
                self._selector.close()
            return child.wait()

    def start(self, command: Sequence[str], environment: dict[str, str]) -> Any:
        """Start the command; returns what can be polled, waited for and stopped."""
        return Child(command, environment)

    def _environment(self, address: str) -> dict[str, str]:
        told = {
            "agent": address,
            "steps": self._options.steps,
            "replay": self._options.replay,
            "scratch": self._scratch,
        }
        paths = [str(BOOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {
            "TORCH_FR_BUFFER_SIZE": _RECORDS,
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "TRAINSPEC_WATCH": json.dumps(told),
        }

    def _serve(self, server: socket.socket, child: Any) -> None:
        ended: float | None = None
        while True:
            for key, _ in self._selector.select(timeout=0.2):
                if key.fileobj is server:
                    self._accept(server)
                else:
                    self._read(key.fileobj)  # type: ignore[arg-type]
            now = time.monotonic()
            if child.poll() is None:
                is_blocked = self._looks_blocked(now)
                if is_blocked or (self._options.fail_fast and any(map(is_must, self.findings))):
                    self._was_stopped = True
                    child.stop(signal.SIGTERM)
                continue
            ended = ended or now
            if not self._lines or now - ended > _GRACE_SECONDS:
                return

    def _accept(self, server: socket.socket) -> None:
        connection, _ = server.accept()
        connection.setblocking(False)
        self._lines[connection] = b""
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._close(connection)
            return
        *lines, self._lines[connection] = (self._lines[connection] + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event["e"] == "hello" and event["token"] != self._token:
                self._close(connection)
                return
            try:
                self._report(self._take(connection, event))
            except Exception as error:  # the script goes on, and so does its judge
                self.run.notes.append(f"an event of a rank failed: {error!r}")

    def _close(self, connection: socket.socket) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(connection)
        connection.close()
        self._lines.pop(connection, None)
        rank = self._ranks.pop(connection, None)
        if rank is not None:
            rank.is_open = False

    def _take(self, connection: socket.socket, event: dict[str, Any]) -> Iterable[Finding]:
        """Take one event; returns what it shows."""
        kind = event.pop("e")
        if kind == "rank":
            self._take_rank(connection, event)
        rank = self._ranks.get(connection)
        if rank is None:
            return ()
        if kind == "collectives":
            rank.read_until = event["t"]
            found = self.run.take_collectives(rank, event["items"], event["missed"])
            self.run.has_small_groups |= event["small"]
            return self._traffic.take(rank, found)
        if kind == "step":
            # It may have come while the rank of its number before it was still closing.
            self.run.ranks.setdefault(rank.rank, rank)
            step = self.run.take_step(rank, event)
            self._announce()
            if step is not None:
                self._report(self._judge(step))
                self._say_how_far(step)
            return ()
        if kind in ("end", "done"):
            rank.has_ended = True
            rank.forwards += event.get("forwards", 0)
            if kind == "done":
                connection.sendall(b"!")
        elif kind == "moved":
            self.moved_to = event["to"]
            del self.run.ranks[rank.rank], self._ranks[connection]
        else:
            self.run.take_news(rank, kind, event)
        if kind == "raised" and not traffic.is_effect(event):
            return traffic.ends(self.run)
        return ()

    def _judge(self, step: Step) -> list[Finding]:
        """Return what the checks find in a step; one that breaks is a note, not the end."""
        found: list[Finding] = []
        self.run.saw |= seen.norms_of(step)
        if len(self.run.records) < compare.KEPT:
            self.run.records.append(compare.record(step))
        for id in sorted(STEP_CHECKS, key=ORDER.index):  # causes before effects
            try:
                found += STEP_CHECKS[id](step)
            except Exception as error:
                self.run.notes.append(f"the check of {id} failed: {error!r}")
        return found

    def _take_rank(self, connection: socket.socket, event: dict[str, Any]) -> None:
        number = event["rank"]
        known = self._ranks.get(connection)
        before = self.run.ranks.get(number)
        if known is None and before is not None and not before.is_open:
            self._begin_anew()  # the command starts another training, or a failed one again
        if known is None or known.rank != number:
            known = self._ranks[connection] = self.run.ranks.setdefault(number, Rank(number))
        known.world = event["world"] or known.world
        if event["world"]:
            self._announce()

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            of = f"{several(self.run.world, 'rank')} of {Path(self._script).name}"
            _say(f"watching {of}; first verdict after step 1")

    def _say_how_far(self, step: Step) -> None:
        """Say at the steps 1, 10, 100, then at each thousandth, what was found so far."""
        number = step.number
        if step.optimizer or not (number in (1, 10, 100) or number % 1000 == 0):
            return
        musts = {f.norm for f in self.findings if is_must(f)}
        advice = {f.norm for f in self.findings} - musts
        found = f"{several(len(musts), 'norm')} broken" if musts else "nothing wrong"
        _say(f"step {number}: {found}" + f", {len(advice)} with advice" * bool(advice))

    def _begin_anew(self) -> None:
        """Close the books of a run whose ranks have ended, and open those of the next."""
        self._report_end(self.run)
        self._went_on = len(self.findings)
        self._steps += max(self.run.steps_taken().values(), default=0)
        self._ranks_seen = max(self._ranks_seen, len(self.run.ranks))
        timeline, notes, saw = self.run.timeline, self.run.notes, self.run.saw
        self.run = Run(
            timeline=timeline,
            spans=self.run.spans,
            notes=notes,
            groups=self._options.replicas,
            saw=saw,
            records=self.run.records,
        )
        self._traffic = traffic.Traffic()

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            known = sum(finding.norm == each.norm for each in self.findings)
            if known < _KEPT:
                self.findings.append(dataclasses.replace(finding, at=time.monotonic()))
            if not known and is_must(finding):
                _say(f"[{finding.norm}] {finding.text}")

    def _report_end(self, run: Run) -> None:
        found = [*traffic.ends(run), *traffic.as_many_steps(run)]
        was_told = any(f.norm == "watch.run.ends" for f in self.findings[self._went_on :])
        self._report(f for f in found if f.norm != "watch.run.ends" or not was_told)

    def _looks_blocked(self, now: float) -> bool:
        """Look for a hang; returns whether the command is to be ended for it."""
        try:
            self._look_for_hang(now)
            return self._is_blocked_by_a_mismatch(now)
        except Exception as error:  # the script goes on, and so does its judge
            self.run.notes.append(f"the search for hangs failed: {error!r}")
            return False

    def _look_for_hang(self, now: float) -> None:
        """Report a hang, and withdraw the report if the ranks go on after all."""
        ranks = self.run.ranks.values()
        if any(self._hang.get(r.rank, r.progress) != r.progress for r in ranks):
            self._hang = {}
            withdrawn = [f for f in self.findings if f.norm == "watch.run.goes-on"]
            self.findings = [f for f in self.findings if f.norm != "watch.run.goes-on"]
            if withdrawn:
                _say("the ranks went on: the hang was none, and is withdrawn")
        if not self._hang and not self._has_mismatch():
            found = list(traffic.goes_on(self.run, now, self._options.patience))
            if found:
                self._hang = {r.rank: r.progress for r in ranks}
                self._report([*(traffic.ends(self.run) if self._any_handles() else ()), *found])

    def _any_handles(self) -> bool:
        ranks = self.run.ranks.values()
        return any(r.handling for r in ranks) and not any(r.raised for r in ranks)

    def _has_mismatch(self) -> bool:
        return any(f.norm == "watch.collectives.match" for f in self.findings)

    def _is_blocked_by_a_mismatch(self, now: float) -> bool:
        """Return whether ranks wait in collectives that do not match: nothing will end that."""
        alive = [rank for rank in self.run.ranks.values() if rank.is_alive]
        found = [f.at for f in self.findings if f.norm == "watch.collectives.match"]
        if not found or not traffic.all_wait(alive, now, _MISMATCH_SECONDS):
            return False
        if min(rank.still_since or now for rank in alive) > found[0] + _GONE_ON_SECONDS:
            return False  # they have gone on after it
        place = f"; {traffic.waits(self.run)}"
        for index, each in enumerate(self.findings):
            if each.norm == "watch.collectives.match":
                self.findings[index] = dataclasses.replace(each, text=each.text + place)
        _say(f"the command is ended: its ranks cannot go on{place}")
        return True

    def verdict(self, own: int) -> Verdict:
        """Return what was found, when the command has ended with status `own`."""
        run = self.run
        if own == 0:  # started again by torchrun, or killed to show that a run can be resumed
            earlier, last = self.findings[: self._went_on], self.findings[self._went_on :]
            self.findings = [*map(_recovered, earlier), *last]
        if not self._was_stopped:
            self._report_end(run)
        steps = self._steps + max(run.steps_taken().values(), default=0)
        unseen = list(dict.fromkeys(run.notes))
        status = int(any(self._options.strict or is_must(each) for each in self.findings))
        if not status and not steps:
            status = 0 if self.moved_to else 2
            unseen.append(self._why_nothing(own))
        ranks = max(self._ranks_seen, len(run.ranks))
        rest = (run.replayed, run.cost(), len(seen.unseen(run.saw, run.replayed)))
        parts, compared = False, ""
        if self._options.compare is not None and steps:
            parts, compared = compare.compare(run.records, self._options.compare)
        status = status or int(parts)
        return Verdict(status, causes_of(self.findings), steps, ranks, unseen, *rest, compared)

    def _why_nothing(self, own: int) -> str:
        if self.moved_to:
            return f"the ranks are judged by the agent of rank 0, at {self.moved_to}"
        if any(rank.forwards for rank in self.run.ranks.values()):
            return f"forwards were seen, but no optimizer step, and the command ended with {own}"
        if any(Path(self._scratch).glob("torch-*")):
            return (
                "torch was imported, but neither a training forward (train(), gradients enabled, "
                "in the thread that imported torch) nor a step of a torch.optim.Optimizer was seen"
            )
        return (
            "no process of the command imported torch, or its Python was started with -E, -I or "
            "-S, which take no start-up hook"
        )


def _say(text: str) -> None:
    print(f"trainspec watch: {text}", file=sys.stderr, flush=True)


def _recovered(finding: Finding) -> Finding:
    """Return the end of a rank as advice: the command went on after it and ended with 0."""
    if finding.norm != "watch.run.ends":
        return finding
    likely = "; ".join(filter(None, [finding.likely, "the command went on and ended with 0"]))
    return dataclasses.replace(finding, is_advice=True, likely=likely)
