"""The agent: listens to the ranks of one command, and judges what they send."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from spec_tests.rig.report.text import several

# `data`, `numbers`, `reduction`, `replayed` and `traffic` register norms.
from spec_tests.watch import compare, data, numbers, reduction, replayed, traffic  # noqa: F401
from spec_tests.watch.norm import STEP_CHECKS, Finding, is_must
from spec_tests.watch.regime import Regimes
from spec_tests.watch.run import Rank, Run, Step
from spec_tests.watch.verdict import ORDER, Verdict, causes_of

BOOT = Path(__file__).parent / "boot"
_GRACE_SECONDS = 3.0
_MISMATCH_SECONDS = 2.0  # that ranks wait in collectives that do not match, until they are ended
_GONE_ON_SECONDS = 10.0  # after a mismatch: then it is not what the ranks wait for
_KEPT = 100  # findings of one norm about one optimizer
_MOST = 2000  # findings, and the first of each norm about each optimizer
_RECORDS = "512"  # collectives that torch's flight recorder keeps: 6 ms to read


class Peer:
    """A connection of a rank: which one, as soon as it says so, and what it has sent of a line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.line = b""
        self.rank: Rank | None = None


class Agent:
    """Listens to the ranks of one command, and runs the checks as their events come."""

    def __init__(self, options: argparse.Namespace, scratch: str) -> None:
        self.run = Run(regimes=Regimes(options.replicas))
        self.findings: list[Finding] = []
        self.moved_to = ""
        self._options = options
        self._scratch = scratch
        self._token = secrets.token_hex(8)
        self._traffic = traffic.Traffic()
        self._selector = selectors.DefaultSelector()
        self._peers: set[Peer] = set()
        self._hang: dict[int, tuple[int, ...]] = {}  # rank to how far it was when a hang was told
        self._was_stopped = False
        self._steps = self._ranks_seen = 0  # of runs that have ended
        self._went_on = 0  # findings that the command has gone on after
        self._script = ""
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._said: set[str] = set()  # norms that a line was printed of
        self._is_announced = self._is_compared = False

    def run_command(self, command: Sequence[str]) -> int:
        """Start the command, serve its ranks until it has ended; returns its own status."""
        many = any("nnodes" in each and not each.endswith("=1") for each in command)
        with socket.create_server(("" if many else "127.0.0.1", 0)) as server:
            server.setblocking(False)
            host = self._options.host or (socket.gethostname() if many else "127.0.0.1")
            address = f"{host}:{server.getsockname()[1]}:{self._token}"
            self._selector.register(server, selectors.EVENT_READ)
            self._script = next((w for w in command if w.endswith(".py")), command[0])
            child = self.start(command, self._environment(address))
            try:
                with _handed_on(child):
                    self._serve(server, child)
            except KeyboardInterrupt:
                child.stop(signal.SIGINT)
            finally:
                for each in list(self._peers):
                    self._close(each)
                self._selector.close()
            return int(child.wait())

    def exit_status(self, own: int) -> int:
        """Return the exit status of a command that ended with `own`, if nothing is found.

        If --steps ended some of the ranks alone, that may have made the others fail: it is 0.
        """
        done = [rank.is_done for rank in self.run.ranks.values()]
        return 0 if any(done) and not all(done) else own if own >= 0 else 128 - own

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
                    self._read(key.data)
            now = time.monotonic()
            if child.poll() is None:
                is_blocked = self._looks_blocked(now)
                if is_blocked or (self._options.fail_fast and any(map(is_must, self.weighed()))):
                    self._was_stopped = True
                    child.stop(signal.SIGTERM)
                continue
            ended = ended or now
            if not self._peers or now - ended > _GRACE_SECONDS:
                return

    def _accept(self, server: socket.socket) -> None:
        peer = Peer(server.accept()[0])
        peer.connection.setblocking(False)
        self._peers.add(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.connection.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, peer.line = (peer.line + data).split(b"\n")
        events = [json.loads(line) for line in lines]
        if not data or any(e["e"] == "hello" and e["token"] != self._token for e in events):
            self._close(peer)
            return
        for event in events:
            with self._noted("an event of a rank"):
                self._report(self._take(peer, event))

    def _close(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._selector.unregister(peer.connection)
        peer.connection.close()
        if peer.rank is not None:
            peer.rank.is_open = False

    def _take(self, peer: Peer, event: dict[str, Any]) -> Iterable[Finding]:
        """Take one event; returns what it shows."""
        kind = event.pop("e")
        if kind == "rank":
            self._take_rank(peer, event)
        rank = peer.rank
        if rank is None:
            return ()
        if kind == "collectives":
            return self._traffic.take(rank, self.run.take_collectives(rank, event))
        if kind == "step":
            # It may have come while the rank of its number before it was still closing.
            self.run.ranks.setdefault(rank.rank, rank)
            step = self.run.take_step(rank, event)
            self._announce()
            if step is not None:
                self._report(self._judge(step))
            return ()
        if kind in ("end", "done"):
            rank.has_ended, rank.is_done = True, kind == "done"
            rank.forwards += event.get("forwards", 0)
            if kind == "done":
                peer.connection.sendall(b"!")
        elif kind == "moved":
            self.moved_to = event["to"]
            del self.run.ranks[rank.rank]
            peer.rank = None
        else:
            self.run.take_news(rank, kind, event)
        if kind == "raised" and not traffic.is_effect(event):
            return traffic.ends(self.run)
        return ()

    def _judge(self, step: Step) -> list[Finding]:
        """Return what the checks find in a step."""
        found: list[Finding] = []
        self._is_compared = True
        if len(self.run.records) < compare.KEPT:
            self.run.records.append(compare.record(step))
        with self._noted(f"relations of ranks in step {step.number}"):
            self.run.regimes.take(step)
        for id in sorted(STEP_CHECKS, key=ORDER.index):  # causes before effects
            with self._noted(f"the check of {id}"):
                found += STEP_CHECKS[id](step)
        return found

    @contextlib.contextmanager
    def _noted(self, what: str) -> Iterator[None]:
        """Make a note of an error: the script goes on, and so does its judge."""
        try:
            yield
        except Exception as error:
            self.run.notes.append(f"{what} failed: {error!r}")

    def _take_rank(self, peer: Peer, event: dict[str, Any]) -> None:
        number = event["rank"]
        before = self.run.ranks.get(number)
        if peer.rank is None and before is not None and not before.is_open:
            self._begin_anew()  # the command starts another training, or a failed one again
        if peer.rank is None or peer.rank.rank != number:
            peer.rank = self.run.ranks.setdefault(number, Rank(number))
        peer.rank.world = event["world"] or peer.rank.world
        if event["world"]:
            self._announce()

    def _announce(self) -> None:
        if not self._is_announced:
            self._is_announced = True
            of = f"{several(self.run.world, 'rank')} of {Path(self._script).name}"
            _say(f"watching {of}")

    def _begin_anew(self) -> None:
        """Close the books of a run whose ranks have ended, and open those of the next."""
        self._report_end(self.run)
        self._went_on = len(self.findings)
        self._steps += max(self.run.steps_taken().values(), default=0)
        self._ranks_seen = max(self._ranks_seen, len(self.run.ranks))
        self.run.regimes.begin_anew()
        kept = ("timeline", "notes", "records", "regimes")
        books = {name: getattr(self.run, name) for name in kept}
        self.run = Run(self.run.training + 1, **books)
        self._traffic = traffic.Traffic()

    def _report(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            same = (finding.norm, finding.optimizer, finding.kind)
            known = self._counts[same] = self._counts[same] + 1
            if known == 1 or (known <= _KEPT and len(self.findings) < _MOST):
                self.findings.append(dataclasses.replace(finding, at=time.monotonic()))
            weighed = self.run.regimes.weigh(finding)
            if finding.norm not in self._said and weighed is not None and is_must(weighed):
                self._said.add(finding.norm)
                right = weighed.likely.partition("; right if ")[2]
                _say(f"[{finding.norm}] {finding.text}" + f"; right if {right}" * bool(right))

    def weighed(self) -> list[Finding]:
        """Return what is found, as it weighs by what the run has shown until now."""
        return [each for each in map(self.run.regimes.weigh, self.findings) if each is not None]

    def _report_end(self, run: Run) -> None:
        with self._noted("relations of ranks at the end"):
            run.regimes.end(run)
        found = [*traffic.ends(run), *traffic.as_many_steps(run)]
        was_told = any(f.norm == "watch.run.ends" for f in self.findings[self._went_on :])
        self._report(f for f in found if f.norm != "watch.run.ends" or not was_told)

    def _looks_blocked(self, now: float) -> bool:
        """Look for a hang; returns whether the command is to be ended for it."""
        with self._noted("the search for hangs"):
            alive = [rank for rank in self.run.ranks.values() if rank.is_alive]
            if any(rank.is_done for rank in self.run.ranks.values()):
                return traffic.all_wait(alive, now, self._options.patience)  # for what was ended
            self._look_for_hang(now)
            return self._is_blocked_by_a_mismatch(now)
        return False

    def _look_for_hang(self, now: float) -> None:
        """Report a hang, and withdraw the report if the ranks go on after all."""
        ranks = self.run.ranks.values()
        if any(self._hang.get(r.rank, r.progress) != r.progress for r in ranks):
            self._hang = {}
            kept = [f for f in self.findings if f.norm != "watch.run.goes-on"]
            if len(kept) < len(self.findings):
                self.findings = kept
                self._said.discard("watch.run.goes-on")
                for same in [each for each in self._counts if each[0] == "watch.run.goes-on"]:
                    del self._counts[same]
                _say("the ranks went on: the hang was none, and is withdrawn")
        has_mismatch = any(f.norm == "watch.collectives.match" for f in self.findings)
        found = list(traffic.goes_on(self.run, now, self._options.patience))
        if found and not self._hang and not has_mismatch:
            self._hang = {r.rank: r.progress for r in ranks}
            handles = any(r.handling for r in ranks) and not any(r.raised for r in ranks)
            self._report([*(traffic.ends(self.run) if handles else ()), *found])

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
        run.regimes.is_cut = any(rank.is_done for rank in run.ranks.values())
        if not own or run.regimes.is_cut:  # started again, or killed to show that it can be resumed
            likely = "the command went on and "
            likely += "--steps ended its ranks" if own else "ended with 0"
            for index, each in enumerate(self.findings[: self._went_on]):
                if each.norm == "watch.run.ends":
                    self.findings[index] = dataclasses.replace(each, likely=likely, is_advice=True)
        if not self._was_stopped:
            self._report_end(run)
        steps = self._steps + max(run.steps_taken().values(), default=0)
        unseen = list(dict.fromkeys(run.notes))
        findings = self.weighed()
        status = int(any(self._options.strict or is_must(each) for each in findings))
        if not status and not steps:
            status = 0 if self.moved_to else 2
            unseen.append(self._why_nothing(own))
        ranks = max(self._ranks_seen, len(run.ranks))
        parts, compared = False, ""
        if self._options.compare is not None and steps:
            parts, compared = compare.compare(run.records, self._options.compare)
        found = causes_of(findings)
        said = (run.replayed, compared, self._is_compared)
        return Verdict(status or int(parts), found, steps, ranks, unseen, *said)

    def _why_nothing(self, own: int) -> str:
        if self.moved_to:
            return f"the ranks are judged by the agent of rank 0, at {self.moved_to}"
        if any(rank.forwards for rank in self.run.ranks.values()):
            return f"forwards were seen, but no optimizer step, and the command ended with {own}"
        return (
            f"the command ended with {own}, and neither a training forward (train(), gradients "
            "enabled, in the thread that imported torch) nor a step of a torch.optim.Optimizer was "
            "seen: perhaps no process of the command imported torch; a Python that was started "
            "with -E, -I or -S takes no start-up hook"
        )


def _say(text: str) -> None:
    sys.stderr.write(f"trainspec watch: {text}\n")


# -------------------------------------------------------------------------------------- the command


@contextlib.contextmanager
def _handed_on(child: Any) -> Iterator[None]:
    """Hand signals that end a job on to the command, whose session is another one."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(n, lambda number, _: child.stop(number)) for n in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


class Child:
    """The command, in a session of its own with all that it starts."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(command, env=environment, start_new_session=True)

    def poll(self) -> int | None:
        """Return the exit status, None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for the end; returns the exit status."""
        return self._process.wait()

    def stop(self, number: int) -> None:
        """Ask all to end with a signal, then end them."""
        for each in (number, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, each)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
