"""Seconds and memory that the summary of a large trace takes, beside json.load of the same file.

One rank reads a synthetic trace of 100 MB, once of a CPU with gloo and once of a GPU with nccl. An
event is a line: PyTorch indents, so its files of that size hold fewer. Arms, each in a process of
its own, so that peaks are their own:

    json.load    the file as Python objects, and nothing else: where most analyses begin
    NAME         summarize_trace of each --impl

Time is the process's on the cores, so that other programs disturb it least; memory is the peak
resident size of the process, less the one before it began. Bounds: 20 s and 1 GB for each file.
"""

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from spec_tests.bench import machine, runner
from spec_tests.chapters.measure.timeline import DEVICES, Timeline
from spec_tests.impls import parse
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.text import grid
from spec_tests.rig.target import load

JSON = "json.load"
MOST_S, MOST_BYTES = 20.0, 1_000_000_000


def write_trace(path: Path, device: str, num_bytes: int) -> int:
    """Write a trace of at least `num_bytes`; return how many events it holds."""
    count = 0
    with path.open("w") as file:
        file.write('{\n"schemaVersion": 1,\n"traceEvents": [')
        for step in itertools.count():
            events = _step(device, step)
            file.write(",\n" * (step > 0) + ",\n".join(map(json.dumps, events)))
            count += len(events)
            if file.tell() >= num_bytes:
                break
        file.write("\n]\n}\n")
    return count


def _step(device: str, number: int) -> list[dict[str, Any]]:
    """The events of one step: a thousand operators, nested three deep, and fifty collectives."""
    line, begin = Timeline(device), 100_000 * number
    line.step(number, begin, begin + 100_000)
    for index in range(1000):
        at = begin + 50 + 90 * index
        for depth, name in enumerate(("aten::linear", "aten::addmm", "aten::mm")):
            line.work(at + depth, at + 80 - depth, name=name, lane=index % 2)
        if index % 20 == 0:
            line.send(at + 40, at + 400, lane=index % 40 // 20)
        line.memory(at, 1_000_000 + index, device_type=device == "cuda")
    line.update(begin + 91_000, begin + 99_000)
    return line.events


def body(ctx: Context, name: str, path: Path) -> dict[str, Any]:
    """Rank body: seconds on the core, and bytes at most beyond those before it."""
    read = None if name == JSON else load(parse(name)).summarize_trace
    before, begun = machine.resident_bytes(), time.process_time()
    found = json.loads(path.read_text()) if read is None else read(path)
    taken, most = time.process_time() - begun, machine.resident_bytes("VmHWM")
    if before is None or most is None:
        raise RuntimeError("expected VmRSS and VmHWM in /proc/self/status")
    steps = 0 if name == JSON else len(found["steps"])
    return {"s": taken, "bytes": max(0, most - before), "steps": steps}


class Trace(runner.Benchmark):
    """A file of each device, read by each arm in a process of its own."""

    name = "trace"
    title = "Reading a trace, beside json.load of the same file"
    options = {"--bytes": {"type": int, "default": 100_000_000, "help": "of the file"}}

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[runner.Section]:
        """One table."""
        rows = []
        with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
            for device in DEVICES:
                path = Path(folder) / "rank0_trace.json"
                count = write_trace(path, device, options.bytes)
                size = {"device": device, "file": path.stat().st_size, "events": count}
                for arm in (JSON, *options.impl):
                    worlds.close()  # a new process for each: a peak does not go down again
                    [found] = worlds.world(1).run(body, arm, path, timeout_s=600, grace_s=60)
                    rows.append({**size, "arm": arm, **found})
        cells = [("trace of", "MB", "events", "arm", "s on the core", "peak MB")]
        for row in rows:
            file = (f"{row['file'] / 1e6:.0f}", f"{row['events']:,}")
            cost = (f"{row['s']:.2f}", f"{row['bytes'] / 1e6:.0f}")
            cells.append((row["device"], *file, row["arm"], *cost))
        verdicts = [_verdict(row) for row in rows if row["arm"] != JSON]
        yield runner.Section("", [grid(cells), runner.bullets(verdicts)], rows)


def _verdict(row: dict[str, Any]) -> str:
    holds = row["s"] <= MOST_S and row["bytes"] <= MOST_BYTES and row["steps"] > 0
    return runner.verdict(
        holds,
        f"{row['arm']}, {row['device']}: {row['s']:.2f} s and {row['bytes'] / 1e6:.0f} MB, bounds "
        f"{MOST_S:g} s and {MOST_BYTES / 1e6:g} MB",
    )


BENCHMARK = Trace()
