"""The demonstration, `make demo`: GPT-2 learns from real text in many ways, with equal losses.

1. Shards from the sources of Python's standard library, tokenizer included.
2. One rank: the baseline. One rank with half the micro-batch: the control. It computes the same
   mean in another order of summation, and so measures how far rounding alone drives two right runs
   apart.
3. Two ranks, same seed, data and global batch: DDP (one reduction per parameter), bucketed DDP,
   PyTorch's DDP; ZeRO-1; FSDP in each strategy, and PyTorch's.
4. Two ranks, one of which is killed with SIGKILL in the middle: torchrun starts both anew, and they
   go on from the last save.

Then a page (OUT/index.html, out of OUT/results.json), and checks that decide the exit status:
losses and gradient norms lie within 10 times the control's distance from the baseline (plus 8
float32 units in the last place, should the control happen to agree bit for bit); the ranks of each
run end with the same weights, bit for bit; each run sends as many bytes per step as its algorithm
needs; the run with the kill equals the same run without, bit for bit.

    python -m solution.demo [--steps 30] [--out outputs/demo] [--device auto] [--attention sdpa]

`runs` starts them, `results` gathers, predicts and judges, `page` draws.
"""

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from solution.data.shards import write_atomically
from solution.demo import page, results
from solution.demo.runs import RUNS, train

DATA = ["--vocab-size", "2048", "--max-bytes", "2000000", "--shard-tokens", "200000"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns 0 if every check holds, 1 if not, 2 if a run failed."""
    flags, started = _flags(arguments), time.perf_counter()
    prepare = [sys.executable, "-m", "solution.data.prepare", "--out", str(flags.out / "data")]
    try:
        subprocess.run([*prepare, *DATA], check=True)
        for run in RUNS:
            train(run, flags)
    except subprocess.CalledProcessError as error:
        said = f"expected status 0, got {error.returncode} from: {shlex.join(error.cmd)}"
        print(f"error: {said}", file=sys.stderr)
        return 2
    found = results.gather(flags.out)
    problems = results.check(found["runs"], flags.out)
    found |= {"problems": problems, "seconds": round(time.perf_counter() - started, 1)}
    write_atomically(flags.out / "results.json", json.dumps(found, indent=1).encode() + b"\n")
    page.draw(flags.out / "results.json", flags.out / "index.html")
    print(f"page: {flags.out / 'index.html'}")
    print("\n".join(problems) or "all checks hold", f"({found['seconds']:.0f} s)")
    return 1 if problems else 0


def _flags(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m solution.demo", description="Train in several ways.", allow_abbrev=False
    )
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps of each run")
    add("--out", type=Path, default=Path("outputs/demo"), help="folder to fill")
    add("--device", default="auto", help="auto, cpu or cuda")
    add("--attention", default="sdpa", help="who computes it, in all runs alike")
    flags = parser.parse_args(arguments)
    if flags.steps < 2:
        parser.error(f"expected --steps >= 2 to see a loss fall, got {flags.steps}")
    return flags


if __name__ == "__main__":
    sys.exit(main())
