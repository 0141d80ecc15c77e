"""A rank's line to the agent: events out, a heartbeat while nothing happens, last collectives.

Events are JSON, one per line, in the order in which they happened. What a rank has sent is with the
kernel, so it reaches the agent even if the rank is killed a moment later.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import platform
import signal
import socket
import sys
import sysconfig
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

from .guard import Current, outwards, watch_this_thread

BEAT_SECONDS = 1.0
_OWN = f"{Path(__file__).parent}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), _OWN})
_BARE = ("<frozen", "<string", "<eval")
_TORCH = Path(torch.__file__).parent
_COLLECTIVE = tuple(
    str(_TORCH / each) for each in ("distributed/", "nn/parallel/distributed.py", "autograd/graph")
)
# These read and write files, start processes, or run the launcher: they wait for no other rank.
_OTHERS = tuple(
    str(_TORCH / "distributed" / each) for each in ("checkpoint", "elastic", "launcher", "run.py")
)
_FUTEX = {"x86_64": "202", "aarch64": "98"}.get(platform.machine())


class Link:
    """The socket of one rank, and the thread that sends heartbeats through it."""

    def __init__(self, address: str) -> None:
        host, port, token = address.rsplit(":", 2)
        self._socket = socket.socket()
        self._socket.settimeout(10)
        self._socket.connect((host, int(port)))
        self._socket.settimeout(None)
        self._lock, self._reading = threading.RLock(), threading.RLock()
        self._main = threading.main_thread()
        self._records = Records()
        self._read = 0.0
        self._handler: Any = None
        self.is_open = True
        self.has_messages = False  # point-to-point
        self.send("hello", token=token)
        self._is_over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="trainspec-watch", daemon=True)
        self._heart.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send one event; after a failure the link is closed and says nothing more."""
        line = json.dumps({"e": kind, "t": time.time_ns(), **fields}) + "\n"
        with self._lock:
            if not self.is_open:
                return
            try:
                self._socket.sendall(line.encode())
            except OSError:  # the agent has ended: the script goes on without it
                self.is_open = False

    def send_collectives(self, *, unless_recent: bool = False) -> None:
        """Send the collectives since the last call, or leave that to the next heartbeat."""
        if unless_recent and time.monotonic() - self._read < BEAT_SECONDS:
            return
        self._read = time.monotonic()
        with self._reading:  # the heartbeat reads as well: each entry once, and in order
            found, missed = self._records.new()
            if found or missed or self._records.were_read:  # also that there were none
                is_small = small_groups(found)
                self.send("collectives", items=found, missed=missed, small=is_small)

    def keep_last_words(self) -> None:
        """Say so when native code aborts, as gloo does where a collective's size is wrong."""
        if self._handler is not None:  # C code must not be left with one that is gone
            return
        # By way of C: a handler of Python's waits for the main thread, and abort() for nobody.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p

        def speak(number: int) -> None:
            libc.signal(number, before)  # whose turn it is when this returns and abort() goes on
            if self._lock.acquire(timeout=1):
                self._lock.release()
                place = script_line(self._frame())
                self.send_collectives()
                self.send("raised", type="abort", text="native code ended it", place=place)

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(speak)
        before = libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def rest(self) -> None:
        """End the heartbeat: no thread may look at groups while the process takes them apart."""
        self._is_over.set()
        self._heart.join(timeout=5)

    def end_rank(self) -> None:
        """End the process when the agent has read what was sent: it answers with one byte."""
        self.send("done")
        self._socket.settimeout(10)
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def drop(self) -> None:
        """Close this end without a lock, which a fork may have taken over; the rank's end stays."""
        self.is_open = False
        self._socket.close()

    def _beat(self) -> None:
        while self.is_open and not self._is_over.wait(BEAT_SECONDS):
            try:
                self.send_collectives()
                self.send("beat", **self._doing())
            except Exception as error:
                self.send("note", text=f"the heartbeat ended: {error!r}")
                return

    def _doing(self) -> dict[str, Any]:
        """Return where the main thread is, whether it waits there, and what it is handling."""
        frame, pending = self._frame(), self._records.pending
        # Of an `except` or a `finally`; a triple in Python 3.11.
        found: Any = sys._current_exceptions().get(self._main.ident or 0)
        error = found[1] if isinstance(found, tuple) else found
        return {
            "place": script_line(frame),
            "waits": _is_blocked(frame, self._main.native_id, bool(pending)),
            "pending": pending,
            "cpu": time.process_time() - time.thread_time(),  # without this thread's own
            "error": None if error is None else error_fields(error),
        }

    def _frame(self) -> Any:
        return sys._current_frames().get(self._main.ident or 0)


def _is_blocked(frame: Any, thread: int | None, is_pending: bool) -> bool:
    """Return whether a thread waits in a collective.

    Args:
        frame: the innermost frame of the thread.
        thread: its number in the kernel.
        is_pending: a collective that this process has begun has not ended.
    """
    code = None if frame is None else frame.f_code
    if code is None:
        return False
    if code.co_name == "<module>" and code.co_filename.startswith(str(_TORCH)):
        return False  # torch is being imported
    if code.co_filename.startswith(_OTHERS):
        return False
    if code.co_filename.startswith(_COLLECTIVE):
        return True
    # `work.wait()` and `loss.item()` are native calls of the script's own frame, as is a sleep.
    return is_pending and _is_in_futex(thread)


def _is_in_futex(thread: int | None) -> bool:
    """Return whether a thread waits for another one; True where the kernel does not say."""
    try:
        call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()[0]
    except (OSError, IndexError):
        return True
    return _FUTEX is None or call in (_FUTEX, "running")


def error_fields(error: BaseException, trace: Any = None) -> dict[str, str]:
    """Return type, message and the script's innermost line of an exception."""
    walked = traceback.walk_tb(trace or error.__traceback__)
    own = [(Path(f.f_code.co_filename).name, line) for f, line in walked if is_own(f)]
    place = f"{own[-1][0]}:{own[-1][1]}" if own else ""
    return {"type": type(error).__name__, "text": str(error)[:2000], "place": place}


class Records:
    """Entries of torch's flight recorder, each read once."""

    def __init__(self) -> None:
        module = getattr(torch._C, "_distributed_c10d", None)
        dumps = ("_dump_fr_trace", "_dump_nccl_trace")
        self._dumps = [f for f in (getattr(module, name, None) for name in dumps) if f is not None]
        self._next = [0] * len(self._dumps)
        self.were_read = False
        self.pending: list[Any] = []  # group, number, name and sizes of the oldest unfinished one

    def new(self) -> tuple[list[list[Any]], int]:
        """Return `[time_ns, group, number, name, sizes, dtypes]` each, and how many were lost."""
        if not torch.distributed.is_initialized():
            return [], 0
        found, missed = [], 0
        self.pending, self.were_read = [], bool(self._dumps)
        for index, dump in enumerate(self._dumps):
            try:
                entries = pickle.loads(dump(True, False, False)).get("entries", [])
            except (RuntimeError, TypeError, ValueError):
                self.were_read = False
                continue
            unfinished = [e for e in entries if not e.get("retired", True)]
            unfinished.sort(key=lambda entry: bool(entry.get("is_p2p")))
            if unfinished and not self.pending:
                self.pending = _record(unfinished[0])[1:]
            fresh = [e for e in entries if e["record_id"] >= self._next[index]]
            if fresh:
                missed += fresh[0]["record_id"] - self._next[index]
                self._next[index] = fresh[-1]["record_id"] + 1
            found += [_record(entry) for entry in fresh if not entry.get("is_p2p")]
        return found, missed


def small_groups(found: list[list[Any]]) -> bool:
    """Return whether numbers were reduced or gathered in a group that is smaller than the world."""
    world = torch.distributed.distributed_c10d._world
    sizes = {world.pg_names.get(pg): len(ranks) for pg, ranks in world.pg_group_ranks.items()}
    largest = max(sizes.values(), default=1)
    return any(
        1 < sizes.get(group, largest) < largest and size for _, group, _, _, size, _ in found
    )


def collectives_so_far() -> int:
    """Return how many collectives this rank has begun, in all groups together."""
    if not torch.distributed.is_initialized():
        return 0
    try:
        groups: Any = torch.distributed.distributed_c10d._world.pg_map
        return sum(pg._get_sequence_number_for_group() for pg in groups)
    except RuntimeError:  # a backend that does not count
        return 0


def _record(entry: dict[str, Any]) -> list[Any]:
    return [
        entry["time_created_ns"],
        entry["process_group"][0],
        entry["collective_seq_id"],
        entry["profiling_name"].split(":")[-1].lstrip("_"),
        entry["input_sizes"],
        entry["input_dtypes"],
    ]


def script_line(frame: Any = None) -> str:
    """Return "file.py:12" of the innermost frame that is the user's own, or ""."""
    own = next(filter(is_own, outwards(frame or sys._getframe(1))), None)
    return "" if own is None else f"{Path(own.f_code.co_filename).name}:{own.f_lineno}"


def script_path() -> int:
    """Return a hash of the user's own lines that are running, from the innermost one outwards."""
    own = filter(is_own, outwards(sys._getframe(1)))
    lines = [f"{frame.f_code.co_filename}:{frame.f_lineno}" for frame in own]
    return zlib.crc32("\n".join(lines).encode())


def is_own(frame: Any) -> bool:
    """Return whether a frame runs the user's own code, not an installed library's."""
    name = frame.f_code.co_filename
    is_in_a_library = any(folder in name for folder in ("site-packages", "dist-packages"))
    return not (name.startswith((*_INSTALLED, *_BARE)) or is_in_a_library)


# ------------------------------------------------------------------------------ the end of the rank


def raised(hidden: Any, kind: Any, error: Any, trace: Any) -> None:
    """Say that an exception ends this rank, then hand it to the hook that this one hides."""
    link = Current.probe.link if Current.probe is not None else None
    if link is not None:
        link.send_collectives()
        link.send("raised", **error_fields(error, trace))
        watch_this_thread(is_free=False)  # its device may wait for other ranks: ask it nothing more
    hidden(kind, error, trace)


def ended() -> None:
    """Say that this rank ends by itself."""
    probe = Current.probe
    if probe is not None and probe.link is not None:
        probe.link.rest()
        probe.link.send_collectives()
        probe.link.send("end", forwards=len(probe.window.forwards))


def spawned(original: Any, function: Any, *rest: Any) -> Any:
    """Run what `torch.multiprocessing.spawn` starts, whose exceptions reach no hook."""

    def reported(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            raised(lambda *_: None, type(error), error, error.__traceback__)
            raise

    return original(reported, *rest)


def forget() -> None:
    """Stop watching: in a fork of the rank, such as a worker that loads data."""
    probe, Current.probe = Current.probe, None
    if probe is not None and probe.link is not None:
        probe.link.drop()
