"""torchrun's agents under test: started from the zygote, their ranks found, hurt and counted.

The agent is `torch.distributed.run` itself and starts its ranks as it does for a user, as processes
of their own. Nobody in them cooperates: which process is which rank stands in its environment under
/proc, so this needs Linux.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from spec_tests.reference_tests.launch import Started, start

# In a store that attempts share, the ranks of the second one find the addresses of the first.
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
HAS_PROC = Path("/proc/self/environ").exists()


class Agent(Started):
    """One torchrun under way, with the ranks that it has started."""

    def wait_until(
        self, is_so: Callable[[], object], expected: str, *, timeout_s: float = 150.0
    ) -> None:
        """Returns as soon as `is_so()`; an error if it never is, or the agent ends before."""
        deadline = time.monotonic() + timeout_s
        while True:
            begun = time.monotonic()
            if is_so():
                return
            looked = time.monotonic() - begun
            if not self.is_alive or time.monotonic() > deadline:
                if is_so():  # it may have come true with the last breath
                    return
                self.close()
                raise TimeoutError(f"expected {expected} within {timeout_s:g} s: {self.wait()}")
            # Looking through /proc costs milliseconds, which the ranks need more.
            time.sleep(min(0.1, max(0.002, 10 * looked)))

    def ranks(self) -> dict[int, int]:
        """The living ranks that this agent has started: rank to process."""
        found = {}
        for pid in _children(self.pid):
            rank = _environment(pid).get("RANK")
            if rank is not None:
                found[int(rank)] = pid
        return found

    def ranks_when_started(self, number: int) -> dict[int, int]:
        """The same, as soon as there are `number` of them."""
        self.wait_until(lambda: len(self.ranks()) >= number, f"{number} ranks")
        return self.ranks()

    def close(self) -> list[int]:
        """End whatever is still there; returns the processes that were."""
        left = list(self.ranks().values())
        self.kill()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left


@contextlib.contextmanager
def torchrun(
    options: Sequence[object],
    module: str,
    arguments: Sequence[object],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    name: str = "agent",
) -> Iterator[Agent]:
    """`torchrun OPTIONS -m MODULE ARGUMENTS` in `folder`; nothing of it outlives the block."""
    words = [*options, "-m", module, *arguments]
    settings = {**ENVIRONMENT, **(environment or {})}
    started = start("torch.distributed.run", words, folder=folder, environment=settings, name=name)
    agent = Agent(started.process, folder, name)
    try:
        yield agent
    finally:
        agent.close()


def _children(parent: int) -> list[int]:
    """Processes whose parent is this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                # The name before the fields may hold blanks and brackets.
                state, ppid = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if int(ppid) == parent and state != "Z":
                    found.append(int(entry.name))
    return found


def _environment(pid: int) -> dict[str, str]:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
    except OSError:
        return {}
    pairs = (item.partition("=") for item in text.split("\0") if item)
    return {name: value for name, _, value in pairs}
