"""Seconds and memory that the summary of a large trace takes, beside json.load of the same file.

One rank reads a synthetic trace of 100 MB, once of a CPU with gloo and once of a GPU with nccl. An
event is a line: PyTorch indents, so its files of that size hold fewer. Arms, each in a process of
its own, so that peaks are their own:

    json.load    the file as Python objects, and nothing else: where most analyses begin
    NAME         summarize_trace of each --impl

Time is the process's on the cores, so that other programs disturb it least; memory is the peak
resident size of the process, less the one before it began. Bounds: 20 s and 1 GB for each file. The
exit status is 1 when one is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path
from typing import Any

from spec_tests.benchmarks import paired
from spec_tests.measure.timeline import DEVICES, Timeline
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds
from spec_tests.target import load, parse

RESULTS = Path(__file__).with_name("results")
JSON = "json.load"
MOST_S, MOST_BYTES = 20.0, 1_000_000_000


def write_trace(path: Path, device: str, num_bytes: int) -> int:
    """A trace of at least `num_bytes`; returns how many events it holds."""
    count = 0
    with path.open("w") as file:
        file.write('{\n"schemaVersion": 1,\n"traceEvents": [\n')
        for step in itertools.count():
            events = _step(device, step)
            text = ",\n".join(json.dumps(event) for event in events)
            file.write(text if step == 0 else ",\n" + text)
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


def _loaded(path: Path) -> Any:
    with path.open() as file:
        return json.load(file)


def _resident_bytes(key: str) -> int:
    for text in Path("/proc/self/status").read_text().splitlines():
        if text.startswith(key):
            return int(text.split()[1]) * 1024
    raise RuntimeError(f"expected {key} in /proc/self/status")


def body(ctx: Context, name: str, path: Path) -> dict[str, Any]:
    """What one arm takes: seconds on the core, and bytes at most beyond those before it."""
    read = _loaded if name == JSON else load(parse(name)).summarize_trace
    before, begun = _resident_bytes("VmRSS"), time.process_time()
    found = read(path)
    taken = time.process_time() - begun
    steps = 0 if name == JSON else len(found["steps"])
    return {"s": taken, "bytes": max(0, _resident_bytes("VmHWM") - before), "steps": steps}


def render(rows: list[dict[str, Any]], environment: dict[str, str], verdicts: list[str]) -> str:
    """The result as Markdown."""
    lines = ["# Reading a trace, beside json.load of the same file", ""]
    lines += [f"- {key}: {value}" for key, value in environment.items()]
    cells = [("trace of", "MB", "events", "arm", "s on the core", "peak MB")]
    for row in rows:
        size = (f"{row['file'] / 1e6:.0f}", f"{row['events']:,}")
        cost = (f"{row['s']:.2f}", f"{row['bytes'] / 1e6:.0f}")
        cells.append((row["device"], *size, row["arm"], *cost))
    lines += ["", paired.table(cells), "", *(f"- {verdict}" for verdict in verdicts)]
    return "\n".join(lines) + "\n"


def _verdicts(rows: list[dict[str, Any]]) -> list[str]:
    said = []
    for row in rows:
        if row["arm"] != JSON:
            holds = row["s"] <= MOST_S and row["bytes"] <= MOST_BYTES and row["steps"] > 0
            said.append(
                f"{'holds' if holds else 'missed'}: {row['arm']}, {row['device']}: {row['s']:.2f} "
                f"s and {row['bytes'] / 1e6:.0f} MB, bounds {MOST_S:g} s and "
                f"{MOST_BYTES / 1e6:g} MB"
            )
    return said


def main(argv: list[str]) -> int:
    """Measure, print, and write `trace.md` and `trace.json`."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests.benchmarks trace")
    parser.add_argument("--impl", action="append", help="as for the suite; default: solution")
    parser.add_argument("--bytes", type=int, default=100_000_000, help="of the file")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    options = parser.parse_args(argv)
    rows = []
    with tempfile.TemporaryDirectory(prefix="trainspec-") as folder:
        for device in DEVICES:
            path = Path(folder) / "rank0_trace.json"
            count = write_trace(path, device, options.bytes)
            size = {"device": device, "file": path.stat().st_size, "events": count}
            for arm in (JSON, *(options.impl or ["solution"])):
                worlds = Worlds()  # a new process for each: a peak does not go down again
                try:
                    [found] = worlds.world(1).run(body, arm, path, timeout_s=600, grace_s=60)
                finally:
                    worlds.close()
                rows.append({**size, "arm": arm, **found})
    verdicts, environment = _verdicts(rows), paired.environment()
    text = render(rows, environment, verdicts)
    print(text)
    paired.write(options.out, "trace", text, {"environment": environment, "rows": rows})
    return int(any(not verdict.startswith("holds") for verdict in verdicts))
