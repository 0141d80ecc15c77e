"""What a rank does to spare the machine: it is one of several on few cores."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path


def spare_the_machine() -> None:
    """Where memory runs out or a crash leaves its core, foreign code pays and not the suite."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every platform
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        Path("/proc/self/oom_score_adj").write_text("900")


def freeze_imports(modules: int) -> int:
    """Freeze what was imported since there were that many modules, if much; their number now.

    A compiler brings 80,000 objects: each collection would take 40 ms from then on.
    """
    if len(sys.modules) > modules + 50:
        gc.collect()
        gc.freeze()
    return len(sys.modules)


def let_gloo_give_way() -> None:
    """Give gloo's threads a lower priority than those that compute.

    One that finds the lock of a connection taken asks again at once. Where its holder waits for the
    same core that went on for a time slice: a tenth of all processor time. The gloo of torch 2.11
    does not name its threads: there they keep their priority.
    """
    if not sys.platform.startswith("linux"):
        return  # elsewhere a thread has no priority of its own here
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 10)
