"""Watch a training command: start it with the probe in each rank, and judge what the ranks send.

    python -m spec_tests watch -- torchrun --standalone --nproc-per-node=2 train.py --steps 100
    python -m spec_tests watch --steps 5 --replay 3 --report outputs/watch -- torchrun ... train.py

Exit status: 1 a MUST does not hold; 2 nothing could be judged; else the command's own, but 0
if --steps ended some ranks and others failed without them. On several nodes, start each node's
torchrun under its own `watch`: the one with rank 0 judges.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spec_tests.rig.clause import Clause
from spec_tests.watch import compare
from spec_tests.watch.agent import Agent
from spec_tests.watch.norm import NORMS
from spec_tests.watch.page import write
from spec_tests.watch.verdict import ORDER, render


def main(arguments: Sequence[str]) -> int:
    """The command; returns its exit status."""
    options, command = parse(arguments)
    if not command:
        print(
            "expected a command after --, such as: watch -- torchrun ... train.py", file=sys.stderr
        )
        return 2
    if shutil.which(command[0]) is None:
        print(f"expected a command that can be run, got {command[0]!r}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="trainspec-watch-") as scratch:
        agent = Agent(options, scratch)
        own = agent.run_command(command)
        verdict = agent.verdict(own)
    print(render(verdict), flush=True)
    if options.report:
        write(verdict, agent.run, command, Path(options.report))
        print(f"report: {Path(options.report) / 'index.html'}")
    return verdict.status or agent.exit_status(own)


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the command after "--"."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests watch",
        usage="%(prog)s [options] -- COMMAND ...",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=_positive, help="end each rank after so many steps")
    parser.add_argument(
        "--replay", type=_positive, metavar="K", help="compute the gradients of step K again"
    )
    parser.add_argument("--report", metavar="DIR", help="write index.html and report.json")
    parser.add_argument(
        "--compare",
        type=compare.earlier,
        metavar="DIR",
        help="the report of another run of the script: say at which step and tensor they part",
    )
    parser.add_argument("--fail-fast", action="store_true", help="end at the first MUST that fails")
    parser.add_argument(
        "--patience", type=float, default=10, help="seconds without progress that are a hang (10)"
    )
    parser.add_argument(
        "--replicas",
        type=_ranks,
        action="append",
        default=[],
        metavar="R,R",
        help="ranks that hold the same parameters and train on different data, such as 0,2; once "
        "for each such group, where the ranks hold different parts of a model",
    )
    parser.add_argument("--strict", action="store_true", help="advice gives exit status 1 too")
    parser.add_argument("--host", default="", help="this node's address for ranks on other nodes")
    given = list(arguments)
    cut = given.index("--") if "--" in given else len(given)
    return parser.parse_args(given[:cut]), given[cut + 1 :]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a number from 1 on, got {text}")
    return value


def _ranks(text: str) -> list[int]:
    try:
        return sorted({int(each) for each in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected ranks such as 0,2, got {text}") from None


def norms() -> list[Clause]:
    """Return every norm of a running script, causes before effects."""
    return [NORMS[id] for id in ORDER]
