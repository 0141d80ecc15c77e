"""Evidence of FSDP's schedule that opens without a machine: traces, counts out of them, drawings.

    python -m solution.demo.evidence [--out evidence]     record (minutes), then draw
    python -m solution.demo.evidence --draw               draw again from the traces that are there

Two ranks on gloo train GPT-2 for four steps of two micro-batches, with our FSDP and with PyTorch's.
OUT gets the last step's traces; and of rank 0 a drawing per setup, and the counts, in README.md.
Traces are thinned to be small: operators below `SHORTEST`, memory events and the arguments of what
is no collective are left out. `python -m solution.analyze_traces OUT` reads them; so does Perfetto.
"""

import argparse
import gzip
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from subprocess import run as execute
from typing import Any, NamedTuple

from solution.data.shards import write_atomically
from solution.demo import page_template
from solution.demo.__main__ import DATA
from solution.demo.runs import FULL_SHARD, Run, train
from solution.measure.intervals import Intervals, intersection, length, merged
from solution.measure.recording import WARM_UP
from solution.measure.trace import GLOO, step_lanes
from solution.measure.trace_file import COLLECTIVE_MARKS, Trace, read_trace

FOLDER = Path(__file__).parent
IMPLEMENTATIONS = {"solution": "ours", "torch": "FSDP2"}
SHORTEST = 20.0  # microseconds
FORWARD, BACKWARD = "aten::embedding", "autograd::engine::evaluate_function"
KEPT = (*COLLECTIVE_MARKS, FORWARD, BACKWARD)
CALLS = {
    **dict.fromkeys(("comm.all_gather_rows", "c10d::_allgather_base_"), "gathers"),
    **dict.fromkeys(("comm.reduce_scatter_sum", "c10d::_reduce_scatter_base_"), "reductions"),
}


class Setup(NamedTuple):
    """One way to train, and what its trace shows."""

    name: str  # of its files
    title: str
    shows: str
    flags: tuple[str, ...]


SETUPS = [
    Setup(
        "every-pass",
        "Tasks 2 and 3: prefetch, and reductions beside computation",
        "Every forward gathers four blocks and the root, every backward the blocks again, and "
        "every micro-batch reduces all five. Ours launches a gather one unit ahead and waits when "
        "that unit begins. FSDP2 prefetches in backward, too; its overlap is that of CUDA's "
        "streams, and on a CPU it waits inside every launch.",
        ("--reduce-grads",),
    ),
    Setup(
        "no-reshard-after-forward",
        "Bonus 1: no reshard after forward",
        "Weights stay from forward to backward: no backward gathers.",
        ("--reduce-grads", "--strategy", "SHARD_GRAD_OP"),
    ),
    Setup(
        "no-reshard-after-backward",
        "Bonus 2: no reshard after backward with accumulation",
        "Weights stay after the first micro-batch: the second forward gathers nothing.",
        ("--reduce-grads", "--no-reshard-after-backward"),
    ),
    Setup(
        "reduce-last",
        "Bonus 3: no reduction before the last micro-batch",
        "Gradients accumulate locally: only the last micro-batch reduces.",
        (),
    ),
]


def record(setup: Setup, impl: str, scratch: Path) -> list[Path]:
    """Train, and return the traces of the ranks."""
    flags = ("--impl", impl, *setup.flags)
    run = Run(f"{setup.name} {impl}", "", FULL_SHARD, 2, flags, f"runs/{setup.name}-{impl}")
    options = {"steps": WARM_UP + 1, "device": "cpu", "attention": "sdpa"}
    train(run, argparse.Namespace(out=scratch, **options))
    return [*run.traces(scratch).rglob("rank*_trace.json")]


def thinned(trace: dict[str, Any]) -> dict[str, Any]:
    """Return a trace without what the counts and drawings do not need."""
    events = []
    for event in trace["traceEvents"]:
        name, category = event["name"], event.get("cat")
        if category == "cpu_op" and event["dur"] < SHORTEST and not name.startswith(KEPT):
            continue
        if event["ph"] == "M" or category in ("cpu_op", "user_annotation"):
            if event["ph"] == "X" and not name.startswith(COLLECTIVE_MARKS):
                event = {key: value for key, value in event.items() if key != "args"}
            events.append(event)
    kept = ("schemaVersion", "distributedInfo", "displayTimeUnit", "baseTimeNanoseconds")
    return {key: trace[key] for key in kept} | {"traceEvents": events}


class Pass(NamedTuple):
    """A forward or backward of one micro-batch; times in microseconds since the step's begin."""

    name: str
    begin: float
    end: float


def passes(trace: Trace, begin: float) -> list[Pass]:
    """Return the passes of the step that begins then; a forward ends where its backward begins."""
    forwards = [span.begin for span in trace.operators if span.name == FORWARD]
    engine: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for span in trace.operators:
        if span.name.startswith(BACKWARD):
            engine[sum(at < span.begin for at in forwards)].append((span.begin, span.end))
    found, last = [], 0.0
    for number, spans in enumerate(engine.values(), start=1):
        first, end = min(spans)[0] - begin, max(b for _, b in spans) - begin
        found += [Pass(f"forward {number}", last, first), Pass(f"backward {number}", first, end)]
        last = end
    return found


def read(path: Path) -> dict[str, Any]:
    """Return counts and hidden shares by pass, and lanes to draw, of a trace of one step."""
    trace = read_trace(path)
    (step,) = step_lanes(trace)
    lanes: dict[str, Intervals] = {"compute": step.from_begin()["compute"]}
    asked = sorted(
        (span.begin - step.begin, span.end - step.begin, CALLS[span.name])
        for span in (*trace.annotations, *trace.operators)
        if span.name in CALLS
    )
    found = passes(trace, step.begin)
    counts = {each.name: dict.fromkeys(("gathers", "reductions"), 0) for each in found}
    for at, _, kind in asked:
        # The root reduces after the engine's last operator, before the next forward.
        among = found[1::2] if kind == "reductions" else found
        counts[[each.name for each in among if each.begin <= at][-1]][kind] += 1
    sent = [span for span in trace.annotations if span.name.startswith(GLOO)]
    calls = [span for span in trace.operators if span.name.startswith("c10d::")]
    for kind in ("gathers", "reductions"):
        windows = [(begin, end) for begin, end, of in asked if of == kind]
        lanes[kind] = merged(
            (one.begin - step.begin, one.end - step.begin)
            for call, one in zip(calls, sent, strict=True)  # gloo runs them in order
            if any(begin <= call.begin - step.begin <= end for begin, end in windows)
        )
    return {
        "duration_us": step.end - step.begin,
        "passes": found,
        "counts": counts,
        "lanes": lanes,
        "hidden": {kind: _hidden(lanes[kind], lanes["compute"]) for kind in CALLS.values()},
    }


def _hidden(sent: Intervals, compute: Intervals) -> float:
    """Return the share of the time of sending that lies beside computation."""
    return length(intersection(sent, compute)) / length(sent)


def draw(out: Path) -> None:
    """Write README.md and the drawings out of the traces that lie in `out`."""
    found = {
        setup: {
            title: read(out / f"{setup.name}-{impl}" / "rank0_trace.json.gz")
            for impl, title in IMPLEMENTATIONS.items()
        }
        for setup in SETUPS
    }
    for setup, both in found.items():
        drawing = page_template(FOLDER / "evidence.svg.jinja").render(setup=setup, both=both)
        write_atomically(out / f"{setup.name}.svg", drawing.encode())
    page = page_template(FOLDER / "evidence.md.jinja").render(found=found, shortest=SHORTEST)
    write_atomically(out / "README.md", page.encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m solution.demo.evidence", description="Record and draw FSDP's schedule."
    )
    parser.add_argument("--out", type=Path, default=Path("evidence"), help="folder to fill")
    parser.add_argument("--draw", action="store_true", help="from the traces that are there")
    scratch = Path("outputs/evidence")
    parser.add_argument("--scratch", type=Path, default=scratch, help="for data and whole traces")
    flags = parser.parse_args(arguments)
    if not flags.draw:
        prepare = ["-m", "solution.data.prepare", "--out", str(flags.scratch / "data"), *DATA]
        execute([sys.executable, *prepare], check=True)
        for setup in SETUPS:
            for impl in IMPLEMENTATIONS:
                folder = flags.out / f"{setup.name}-{impl}"
                folder.mkdir(parents=True, exist_ok=True)
                for path in record(setup, impl, flags.scratch):
                    trace = thinned(json.loads(path.read_text()))
                    text = json.dumps(trace, separators=(",", ":")).encode()
                    write_atomically(folder / f"{path.name}.gz", gzip.compress(text, mtime=0))
    draw(flags.out)
    print(flags.out / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
