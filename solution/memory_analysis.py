"""Memory of one training step: predicted by term, measured, and the difference.

    python -m solution.memory_analysis                                 # GPT-2 small, 8 x 1024
    python -m solution.memory_analysis --model llama --preset 1b --no-measure

The prediction is made with fake tensors: no memory, no GPU. The measurement is two real steps, on a
GPU by CUDA's allocator, on the CPU by MemTracker; it is left out with `--no-measure`, and where the
predicted peak exceeds the memory of the device. On a GPU `--snapshot` writes a history for
pytorch.org/memory_viz. Results: a table and OUT/memory.json. MiB are 2^20 bytes.

Exit status: 0 done, 2 bad input, 3 a step was to be measured and does not fit.
"""

import argparse
import sys
from collections.abc import Sequence

import torch

from solution.console import aligned, significant
from solution.measure.memory import Prediction, kernel_bytes, measured_step, memory_history
from solution.measure.workload import BAD_INPUT, DONE, Workload, keep, parser

MIB = 2**20
DOES_NOT_FIT = 3
STATE = ("parameters", "gradients", "optimizer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return the exit status."""
    command = parser("memory_analysis", "Memory of a training step.")
    command.add_argument("--no-measure", action="store_true", help="predict only")
    command.add_argument("--snapshot", action="store_true", help="history for memory_viz (GPU)")
    flags = command.parse_args(arguments)
    try:
        work = Workload(flags, is_run=not flags.no_measure)
        if flags.snapshot and (work.device.type != "cuda" or flags.no_measure):
            raise ValueError("--snapshot is a history of CUDA's allocator: expected --device cuda")
        return _analyse(work, flags)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return BAD_INPUT


def _analyse(work: Workload, flags: argparse.Namespace) -> int:
    """Predict, measure what fits, print, keep."""
    found = work.predict(work.batch_size)
    peak = f"{_mib(found.peak_bytes)} MiB"
    print(f"{work.title}\n  predicted peak: {peak}", flush=True)  # a measurement may be killed
    room = None if flags.no_measure else _room(work.device)
    fits = room is None or found.peak_bytes <= room
    measured: dict[str, int] = {}
    if fits and not flags.no_measure:
        model, ids = work.build(work.batch_size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        with memory_history(flags.out / "memory_snapshot.pickle" if flags.snapshot else None):
            measured = measured_step(model, optimizer, ids, dtype=work.dtype)
    print(_table(found, measured))
    print(_in_the_exercise_s_words(found, measured))
    predicted = {"terms": found.terms, "peak": found.peak_bytes}
    record = {"setup": work.title, "predicted": predicted, "measured": measured}
    keep(flags.out / "memory.json", record)
    if room is None or fits:
        return DONE
    sys.stderr.write(
        f"error: expected a step that fits into {_mib(room)} MiB, got a predicted peak of {peak}; "
        "take a smaller batch, --activation-checkpointing selective, or a larger device\n"
    )
    return DOES_NOT_FIT


def _room(device: torch.device) -> int | None:
    """Return the bytes that a step may take; None where that is not known."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    return kernel_bytes("/proc/meminfo", "MemAvailable")


def _mib(size: int) -> str:
    return significant(size / MIB, decimals=2)


def _in_the_exercise_s_words(found: Prediction, measured: dict[str, int]) -> str:
    """Return the rows that the course's script prints; its MB are MiB, its difference is last."""
    sizes = [found.terms[term] for term in STATE]
    rows = dict(zip((*STATE[:2], "optimizer states"), sizes, strict=True))
    rows = {f"estimated {name}": size for name, size in {**rows, "total": sum(sizes)}.items()}
    if measured:
        rows["actual peak"] = measured["peak"]
        rows |= {"actual reserved": measured["reserved"]} if "reserved" in measured else {}
        rows["difference, actual peak - estimated total"] = measured["peak"] - sum(sizes)
    header = ("  as the exercise prints it", "MiB")
    return aligned([header, *((f"  {name}", _mib(size)) for name, size in rows.items())])


def _table(found: Prediction, measured: dict[str, int]) -> str:
    predicted = {term: found.terms[term] for term in (*STATE, "activations")}
    predicted |= {"peak": found.peak_bytes, "after_step": found.after_step}
    rows = [("  MiB", "predicted", "measured", "error")]
    for name, size in predicted.items():
        real = measured.get(name)
        error = f"{100 * (size - real) / real:+.2f} %" if real else ""
        words = "after the step (often printed as the peak)" if name == "after_step" else name
        shown = _mib(real) if real else ""
        rows.append((f"  {words}", _mib(size), shown, error))
    if "reserved" in measured:
        rows.append(("  reserved by the allocator", "", _mib(measured["reserved"]), ""))
    return aligned(rows)


if __name__ == "__main__":
    sys.exit(main())
