"""Start a command as `python -m MODULE ...` would, without paying for the import of torch.

The process is forked from the zygote that ranks come from, which has torch loaded and nothing of
ours; it then runs the module as `__main__`, in its own folder, with its output in files. Ranks that
the suite's own command forks come from that zygote too. torchrun's agent is such a command as well:
it starts its ranks as it does for a user, as processes of their own. Nobody in them cooperates:
which process is which rank is read from /proc, so this needs Linux.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import re
import runpy
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import current_process, get_context
from pathlib import Path
from typing import Any

from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.ranks.zygote import (
    RANK_ENVIRONMENT,
    forget_triton,
    share_zygote,
    without_main,
)

ROOT = Path(__file__).resolve().parents[3]
HAS_PROC = Path("/proc/self/environ").exists()

# What would make a command believe that it is part of another run.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str

    def require(self, status: int, says: str = "") -> Outcome:
        """Return this outcome.

        Raises:
            AssertionError: it is not as expected: another status, an error that does not say
                `says`, or a refusal in the form of a traceback.
        """
        assert self.status == status, f"expected {status}, got {self.status}: {self.err}{self.out}"
        assert says in self.err, f"expected {says!r}, got: {self.err}"
        assert not (status and "Traceback" in self.err), self.err
        return self


class Started:
    """A command under way, with the ranks that it has started if it is torchrun's agent."""

    def __init__(self, process: Any, folder: Path, name: str) -> None:
        self.process, self.folder, self.name = process, folder, name
        self.pid: int = process.pid

    def wait(self, timeout_s: float = 200.0) -> Outcome:
        """Return its end.

        Raises:
            TimeoutError: it had not ended after `timeout_s`, and was killed.
        """
        self.process.join(timeout_s)
        is_late = self.process.is_alive()
        if is_late:
            self.process.kill()
            self.process.join()
        out, err = ((self.folder / f"{self.name}.{kind}").read_text() for kind in ("out", "err"))
        if is_late:
            raise TimeoutError(f"{self.name}: no end after {timeout_s} s\n{out}\n{err}")
        return Outcome(self.process.exitcode, out, err)

    def wait_until(self, is_so: Callable[[], object], expected: str) -> None:
        """Return as soon as `is_so()`, which may take 150 s.

        Raises:
            TimeoutError: it never was, or the command ended before; everything is killed.
        """
        deadline = time.monotonic() + 150
        while True:
            begun = time.monotonic()
            is_over = not self.process.is_alive() or begun > deadline
            if is_so():  # it may have come true with the last breath
                return
            if is_over:
                self.close()
                raise TimeoutError(f"expected {expected} within 150 s: {self.wait()}")
            # Looking through /proc costs milliseconds, which the ranks need more.
            time.sleep(min(0.1, max(0.002, 10 * (time.monotonic() - begun))))

    def ranks(self) -> dict[int, int]:
        """Return the living ranks that it has started: rank to process."""
        return _ranks_below(self.pid)

    def ranks_when_started(self, number: int) -> dict[int, int]:
        """Return the same, as soon as there are `number` of them."""
        self.wait_until(lambda: len(self.ranks()) >= number, f"{number} ranks")
        return self.ranks()

    def close(self) -> list[int]:
        """End whatever is still there; return the ranks' processes that were."""
        left = list(self.ranks().values()) if HAS_PROC else []
        self.process.kill()
        self.process.join()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


def start(
    module: str,
    arguments: Sequence[object],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "command",
) -> Started:
    """Begin `python -m module arguments...` in `folder`; `module` may be a program's text too.

    Args:
        name: of the files in `folder` that take its output; with a path, they are there.
    """
    # For what the command itself starts; this process gets the parent's sys.path.
    settings = {**RANK_ENVIRONMENT, "PYTHONPATH": str(ROOT), **(environment or {})}
    words = [str(argument) for argument in arguments]
    process = get_context("forkserver").Process(
        target=_run, args=(module, words, str(folder), settings, name), daemon=True
    )
    with without_main():  # not pytest's again
        process.start()
    return Started(process, folder, name)


def run(
    module: str,
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    status: int = 0,
    says: str = "",
) -> Outcome:
    """`start`, wait for the end, and see that it is the expected one (`Outcome.require`)."""
    ended = start(module, arguments, folder=folder, environment=environment).wait()
    return ended.require(status, says)


def run_ranks(
    module: str, *arguments: object, folder: Path, num_ranks: int = 2, status: int = 0
) -> list[Outcome]:
    """Run the command on every rank of a run, with the environment that torchrun gives."""
    size = {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = []
    for rank in range(num_ranks):
        settings = {**size, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        name = f"rank{rank}"
        ranks.append(start(module, arguments, folder=folder, environment=settings, name=name))
    return [ended.require(status) for ended in [rank.wait() for rank in ranks]]


@contextlib.contextmanager
def torchrun(
    options: Sequence[object],
    module: str,
    arguments: Sequence[object],
    *,
    folder: Path,
    name: str = "agent",
) -> Iterator[Started]:
    """`torchrun OPTIONS -m MODULE ARGUMENTS` in `folder`; nothing of it outlives the block."""
    words = [*options, "-m", module, *arguments]
    # In a store that attempts share, the ranks of the second one find the addresses of the first.
    settings = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    agent = start("torch.distributed.run", words, folder=folder, environment=settings, name=name)
    try:
        yield agent
    finally:
        agent.close()


_FORKED = """\
import functools, sys, torch.multiprocessing
spawned = torch.multiprocessing.start_processes
torch.multiprocessing.spawn = functools.partial(spawned, start_method="fork")
exec(compile(open(sys.argv[1]).read(), sys.argv[1], "exec"), {"__name__": "__main__"})
"""


def run_script(text: str, folder: Path) -> Outcome:
    """Run a script that may spawn ranks; return how it ended.

    Its ranks are forked, so that neither they nor the script import torch: a script of two ranks
    takes a second in place of ten.
    """
    (folder / "forked.py").write_text(text, encoding="utf-8")
    return start(_FORKED, ["forked.py"], folder=folder, name="script").wait()


def solution(name: str) -> Any:
    """Return a module of the reference, in a rank: the suite's own process never imports it."""
    return importlib.import_module(f"solution.{name}")


def on_ranks(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test on so many ranks, where the reference can be imported.

    Its first argument is the rank's context; the others, fixtures and parameters, are sent there.
    """

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(test).parameters

        @functools.wraps(test)
        def either(*place: Context, worlds: Worlds | None = None, **given: Any) -> None:
            if worlds is None:  # on a rank
                test(*place, **given)
            else:
                world = worlds.world(number, parse("solution"))
                world.run(either, timeout_s=120.0, **given)

        kind = inspect.Parameter.KEYWORD_ONLY
        asked = [inspect.Parameter(name, kind) for name in ("worlds", *own)]
        either.__signature__ = inspect.Signature(asked)  # type: ignore[attr-defined]  # for pytest
        return either

    return decorated


def free_port() -> int:
    """Return a port of the loopback that nobody listens on, nor is given one day.

    What listens on a port that the kernel chose (gloo, for every group) gets it from 32768 on, the
    lowest such port of Linux; a port from there may be gone before a run comes to use it.
    """
    while True:
        port = secrets.randbelow(32768 - 20000) + 20000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _run(
    module: str, arguments: list[str], folder: str, environment: dict[str, str], name: str
) -> None:
    """In the new process: become the command."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    share_zygote()  # the one that it came from itself
    this: Any = current_process()
    this._config["daemon"] = False  # a daemon may have no children
    for number, kind in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for foreign in [each for each in os.environ if each in FOREIGN or each.startswith("PYTEST_")]:
        del os.environ[foreign]
    os.environ.update(environment)
    if environment.get("TRITON_INTERPRET"):
        forget_triton()
    sys.argv = ["-c", *arguments]  # runpy puts the name of a module there
    if "\n" in module:
        exec(compile(module, "<program>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)


def _ranks_below(parent: int) -> dict[int, int]:
    """Return rank to process of those that this one has started, by their environment."""
    found = {}
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for task in Path(f"/proc/{parent}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                with contextlib.suppress(OSError):
                    known = Path(f"/proc/{pid}/environ").read_bytes()
                    if rank := re.search(rb"(?:^|\0)RANK=(\d+)", known):
                        found[int(rank[1])] = pid
    return found
