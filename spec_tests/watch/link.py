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
import signal
import socket
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Any

import torch

BEAT_SECONDS = 1.0
_OWN = f"{Path(__file__).parent}{os.sep}"
_INSTALLED = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), _OWN})
_BARE = ("<frozen", "<string", "<eval")


class Link:
    """The socket of one rank, and the thread that sends heartbeats through it."""

    def __init__(self, address: str) -> None:
        host, port, self._token = address.rsplit(":", 2)
        self._socket = socket.socket()
        self._socket.settimeout(10)
        self._socket.connect((host, int(port)))
        self._socket.settimeout(None)
        self._lock, self._reading = threading.Lock(), threading.RLock()
        self._main = threading.main_thread()
        self._records = Records()
        self._read = 0.0
        self._handler: Any = None
        self.is_open = True
        self.send("hello", token=self._token, pid=os.getpid())
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
            if found or missed:
                self.send("collectives", items=found, missed=missed)

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
                place = self._doing()[0]
                self.send_collectives()
                self.send("raised", type="abort", text="native code ended it", place=place)

        self._handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(speak)
        before = libc.signal(signal.SIGABRT, ctypes.cast(self._handler, ctypes.c_void_p))

    def rest(self) -> None:
        """End the heartbeat: no thread may look at groups while the process takes them apart."""
        self._is_over.set()
        self._heart.join(timeout=5)

    def wait_for_answer(self, seconds: float) -> None:
        """Wait until the agent has read what was sent; it answers with one byte."""
        self.send("done")
        self._socket.settimeout(seconds)
        with contextlib.suppress(OSError):
            self._socket.recv(1)

    def drop(self) -> None:
        """Close this end without a lock, which a fork may have taken over; the rank's end stays."""
        self.is_open = False
        self._socket.close()

    def _beat(self) -> None:
        while self.is_open and not self._is_over.wait(BEAT_SECONDS):
            try:
                self.send_collectives()
                place, is_waiting = self._doing()
                pending = self._records.pending
                self.send(
                    "beat", place=place, waits=is_waiting, pending=pending, cpu=time.process_time()
                )
            except Exception as error:
                self.send("note", text=f"the heartbeat ended: {error!r}")
                return

    def _doing(self) -> tuple[str, bool]:
        """Return the script's line of the main thread, and whether it is inside a collective."""
        frame = sys._current_frames().get(self._main.ident or 0)
        innermost = frame.f_code.co_filename if frame else ""
        place = script_line(frame)
        return place, "distributed" in innermost or innermost.endswith("graph.py")


class Records:
    """Entries of torch's flight recorder, each read once."""

    def __init__(self) -> None:
        module = getattr(torch._C, "_distributed_c10d", None)
        dumps = ("_dump_fr_trace", "_dump_nccl_trace")
        self._dumps = [f for f in (getattr(module, name, None) for name in dumps) if f is not None]
        self._next = [0] * len(self._dumps)
        self.pending = ""  # the oldest collective that has not ended

    def new(self) -> tuple[list[list[Any]], int]:
        """Return `[time_ns, group, number, name, sizes, dtypes]` each, and how many were lost."""
        if not torch.distributed.is_initialized():
            return [], 0
        found, missed = [], 0
        for index, dump in enumerate(self._dumps):
            try:
                entries = pickle.loads(dump(True, False, False)).get("entries", [])
            except (RuntimeError, TypeError, ValueError):
                continue
            unfinished = [e for e in entries if not e.get("retired", True)]
            self.pending = unfinished[0]["profiling_name"].split(":")[-1] if unfinished else ""
            fresh = [e for e in entries if e["record_id"] >= self._next[index]]
            if fresh:
                missed += fresh[0]["record_id"] - self._next[index]
                self._next[index] = fresh[-1]["record_id"] + 1
            found += [_record(entry) for entry in fresh if not entry.get("is_p2p")]
        return found, missed


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
    """Return "file.py:12 in function" of the innermost frame that is the user's own, or ""."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((*_INSTALLED, *_BARE)) and "site-packages" not in name:
            return f"{Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
