"""Start a command as `python -m MODULE ...` would, without paying for the import of torch.

The process is forked from the zygote that ranks come from, which has torch loaded and nothing of
ours; it then runs the module as `__main__`, in its own folder, with its output in files.
"""

from __future__ import annotations

import json
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from spec_tests.rig.zygote import RANK_ENVIRONMENT, forget_triton, start_method

ROOT = Path(__file__).resolve().parents[2]

# What would make a command believe that it is part of another run.
FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Outcome:
    """How a command ended."""

    status: int
    out: str
    err: str


class Started:
    """A command under way."""

    def __init__(self, process: Any, folder: Path, name: str) -> None:
        self.process, self._folder, self._name = process, folder, name

    @property
    def pid(self) -> int:
        """Of the command's process."""
        return int(self.process.pid)

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return bool(self.process.is_alive())

    def kill(self) -> None:
        """End it at once, if it has not ended."""
        self.process.kill()
        self.process.join()

    def wait(self, timeout_s: float = 200.0) -> Outcome:
        """Its end; after `timeout_s` it is killed, and that is an error."""
        self.process.join(timeout_s)
        is_late = self.process.is_alive()
        if is_late:
            self.kill()
        out, err = ((self._folder / f"{self._name}.{kind}").read_text() for kind in ("out", "err"))
        if is_late:
            raise TimeoutError(f"{self._name}: no end after {timeout_s} s\n{out}\n{err}")
        return Outcome(self.process.exitcode, out, err)


def start(
    module: str,
    arguments: Sequence[object],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "command",
) -> Started:
    """Begin `python -m module arguments...` in `folder`; `module` may be a program's text too."""
    # For what the command itself starts; this process gets the parent's sys.path.
    settings = {**RANK_ENVIRONMENT, "PYTHONPATH": str(ROOT), **(environment or {})}
    process = get_context(start_method()).Process(  # type: ignore[attr-defined]  # both have it
        target=_run,
        args=(module, [str(argument) for argument in arguments], str(folder), settings, name),
        daemon=True,
    )
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):  # not pytest's again
        process.start()
    return Started(process, folder, name)


def run(
    module: str,
    *arguments: object,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """`start`, and wait for the end."""
    return start(module, arguments, folder=folder, environment=environment).wait()


def answer(
    program: str, *arguments: object, folder: Path, environment: Mapping[str, str] | None = None
) -> Any:
    """Run a program's text; return what its last line says as JSON.

    Raises:
        AssertionError: it failed; with what it printed.
    """
    ended = run(program, *arguments, folder=folder, environment=environment)
    assert ended.status == 0, ended.err + ended.out
    return json.loads(ended.out.splitlines()[-1])


def fresh_lines(program: str, *arguments: object, environment: Mapping[str, str]) -> list[str]:
    """Run a program's text in a new interpreter, which may start processes; return its output.

    A fork of the zygote is a daemon and may not.
    """
    command = [sys.executable, "-c", program, *map(str, arguments)]
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.splitlines()


def run_ranks(
    module: str,
    *arguments: object,
    num_ranks: int,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> list[Outcome]:
    """The command on every rank of a run, with the environment that torchrun gives."""
    port = free_port()
    shared = {
        **(environment or {}),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    ranks = [
        start(
            module,
            arguments,
            folder=folder,
            environment={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            name=f"rank{rank}",
        )
        for rank in range(num_ranks)
    ]
    return [rank.wait() for rank in ranks]


def free_port() -> int:
    """A port of the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(
    module: str, arguments: list[str], folder: str, environment: dict[str, str], name: str
) -> None:
    """In the new process: become the command."""
    os.chdir(folder)
    for number, kind in ((1, "out"), (2, "err")):
        descriptor = os.open(f"{name}.{kind}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, number)
        os.close(descriptor)
    for foreign in FOREIGN:
        os.environ.pop(foreign, None)
    os.environ.update(environment)
    if environment.get("TRITON_INTERPRET"):
        forget_triton()
    sys.argv = ["-c", *arguments]  # runpy puts the name of a module there
    if "\n" in module:
        exec(compile(module, "<program>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
