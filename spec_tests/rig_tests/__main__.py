"""`python -m spec_tests.rig_tests [--programs 2000] [--ranks 2 3 4]`: does sim agree with gloo?

Runs random programs of collectives on simulated and on live ranks and compares every tensor. Exit
status 1, and the program, where they differ.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

from spec_tests.rig.ranks.zygote import start_zygote

if __name__ == "__main__":
    start_zygote()

# It preloads torch for the ranks while this process imports it.
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig_tests import programs


def main(arguments: list[str]) -> int:
    """Compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--programs", type=int, default=2000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--first", type=int, default=0, help="seed of the first program")
    options = parser.parse_args(arguments)
    worlds, found, statements = Worlds(), [], 0
    begun = time.perf_counter()
    share = -(-options.programs // len(options.ranks))
    try:
        for size in options.ranks:
            sim, gloo = (worlds.world(size, transport=name) for name in ("sim", "gloo"))
            for batch in programs.batches(options.first, share, size):
                found += programs.disagreements(batch, sim, gloo)
                statements += sum(len(program.statements) for program in batch)
    finally:
        worlds.close()
    for line in found:
        print(line)
    print(
        f"{share * len(options.ranks)} programs of {statements} collectives at {options.ranks} "
        f"ranks: {len(found)} disagreements, {time.perf_counter() - begun:.0f} s"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
