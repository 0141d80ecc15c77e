"""The watcher of a rank: a thread that tells the parent what the rank is doing.

It answers while the main thread is blocked in C++, and ends the process when the parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from spec_tests.rig.ranks import wire
from spec_tests.rig.ranks.recorder import issued_by_all_groups

_KEPT: list[object] = []  # what C code calls must not be collected
_RANK = str(Path(__file__).with_name("rank.py"))

LAST_WORDS = ".last"
"""Suffix of the file that a rank writes when it aborts, beside its output."""


@dataclass(frozen=True)
class Doing:
    """What a rank says of itself while it runs a body: stack, last collectives, how many in all.

    `rank`: which one it is, of simulated ranks.
    """

    stack: str
    collectives: tuple[str, ...] = ()
    issued: int = -1
    rank: int = -1


def watch(control: Connection, scratch: str, answer: Callable[[], Doing] | None = None) -> None:
    """Answer who asks what this process does, and end it when its parent has gone."""
    while True:
        try:
            control.recv_bytes()
        except (EOFError, OSError):
            # The parent is gone: nobody will read an answer, or tidy up.
            shutil.rmtree(Path(scratch).parent, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.killpg(os.getpid(), signal.SIGKILL)  # this process, and whatever it has started
            os._exit(70)
        doing = (answer or _doing)()
        with contextlib.suppress(OSError):
            control.send_bytes(wire.dumps(doing))


def keep_last_words(path: Path) -> None:
    """Have this process write to `path` what it was doing when it aborts, as gloo does."""
    # By way of C: a handler of Python's own only runs once the main thread gets on, and abort()
    # waits for nobody. It may run in a thread of gloo's, while the main thread waits.
    libc = ctypes.CDLL(None)
    libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

    def write(number: int) -> None:
        libc.signal(number, 0)  # the default: a second abort ends the process
        path.write_bytes(wire.dumps(_doing()))

    handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(write)
    _KEPT.append(handler)
    libc.signal(signal.SIGABRT, ctypes.cast(handler, ctypes.c_void_p))


def _doing() -> Doing:
    stack = stack_of_body(threading.main_thread())
    return Doing(stack, _last_collectives(), issued_by_all_groups())


def stack_of_body(thread: threading.Thread | None) -> str:
    """Where a thread is in its body, or in the import at the start; empty between two tasks."""
    # Who holds a frame keeps its locals alive, and a body that measures memory counts them: so not
    # extract_stack, which reads files between one frame and the next.
    frame = sys._current_frames().get(thread.ident or 0) if thread is not None else None
    places = []
    while frame is not None:
        places.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, None))
        frame = frame.f_back
    stack = traceback.StackSummary.from_list(reversed(places))
    own = ((_RANK, "_run"), (_RANK, "load_implementation"))
    inside = [i for i, f in enumerate(stack) if (f.filename, f.name) in own]
    body = [f for f in stack[inside[-1] + 1 :] if "/rig/sim/" not in f.filename] if inside else []
    return "".join(traceback.format_list(body))


def _last_collectives(limit: int = 6) -> tuple[str, ...]:
    """The newest entries of torch's flight recorder, where this build has one for gloo."""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None:
        return ()
    try:
        trace = json.loads(dump())
    except (RuntimeError, ValueError):
        return ()
    entries = trace.get("entries", [])
    # Entries of earlier groups are still there: begin at the last one that was a group's first.
    starts = [i for i, entry in enumerate(entries) if entry["collective_seq_id"] == 1]
    return tuple(
        f"{entry['profiling_name'].removeprefix('gloo:')} {entry['input_sizes']} "
        f"#{entry['collective_seq_id']} of {entry['process_group'][0]}"
        for entry in entries[starts[-1] if starts else 0 :][-limit:]
    )
