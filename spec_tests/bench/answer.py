"""How soon an answer is there: `check` on README's own faulty file, from the command on.

The whole command as a user starts it, in a process of its own; each figure is the median of several
runs with its range. Run it on a quiet machine.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from spec_tests.bench import runner
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import REPOSITORY_ROOT

# What is asked, the line of the output that ends the wait ("": the last one), and the bound.
FIGURES = {
    "the first finding: s": ((), "first finding", 5.0),
    "the whole ddp chapter: s": ((), "ddp  ", 9.0),
    "the causes, and the process has ended: s": ((), "", None),
    "the same of one clause: s": (("--clause", "ddp.gradients.mean"), "", None),
    "the same with --quick: s": (("--quick", "--clause", "ddp.*"), "", None),
}


def faulty() -> str:
    """README's mine.py."""
    text = (REPOSITORY_ROOT / "README.md").read_text()
    return text.partition("```python\n# mine.py\n")[2].partition("```")[0]


def wait_s(arguments: tuple[str, ...], line: str, file: Path) -> float:
    """From the command to the line of its output that begins so; then it is ended."""
    command = [sys.executable, "-u", "-m", "spec_tests", "check", "--impl", str(file), *arguments]
    begun = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for shown in process.stdout:
            if line and shown.startswith(line):
                found = time.perf_counter() - begun
                process.terminate()
                return found
    if line:
        raise RuntimeError(f"expected a line that begins with {line!r}, got none")
    return time.perf_counter() - begun


class Answer(runner.Benchmark):
    """Seconds until a user knows."""

    name = "answer"
    title = "The answer"
    options = {"--repetitions": {"type": int, "default": 5, "help": "of each figure"}}

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[runner.Section]:
        """All figures, in turn, so that a slow moment meets all of them."""
        found: dict[str, list[float]] = {label: [] for label in FIGURES}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "mine.py"
            file.write_text(faulty())
            for _ in range(options.repetitions):
                for label, (arguments, line, _) in FIGURES.items():
                    found[label].append(wait_s(arguments, line, file))
        rows = [["what", "median", "lowest", "highest"]]
        said = []
        for label, (*_, bound) in FIGURES.items():
            middle = statistics.median(found[label])
            shown = (middle, min(found[label]), max(found[label]))
            rows.append([label, *(f"{value:.1f}" for value in shown)])
            if bound is not None:
                words = f"{label} {middle:.1f}, at most {bound:g}"
                said.append(runner.verdict(middle <= bound, words))
        yield runner.Section("", [runner.table(rows), runner.bullets(said)], found)


BENCHMARK = Answer()
