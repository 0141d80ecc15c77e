"""How soon an answer is there: `check` on README's own faulty file, from the command on.

The whole command as a user starts it, in a process of its own; each figure is the median of several
runs with its range. Run it on a quiet machine.
"""

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from spec_tests.bench import runner
from spec_tests.bench.runner import Figure
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.target import REPOSITORY_ROOT


def faulty() -> str:
    """README's mine.py."""
    text = (REPOSITORY_ROOT / "README.md").read_text()
    return text.partition("```python\n# mine.py\n")[2].partition("```")[0]


def wait_s(arguments: Sequence[str], line: str, file: Path) -> float:
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


def _figure(label: str, words: str = "", line: str = "", bound: float = 0.0) -> Figure:
    """The wait for a line of the output, "" for the last one, on README's file."""

    def measure(worlds: Worlds) -> float:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "mine.py"
            file.write_text(faulty())
            return wait_s(words.split(), line, file)

    return Figure(f"{label}: s", measure, "at most" * bool(bound), bound)


class Answer(runner.Figures):
    """Seconds until a user knows."""

    name = "answer"
    title = "The answer"
    figures = {
        figure.label: figure
        for figure in (
            _figure("the first finding", line="first finding", bound=5.0),
            _figure("the whole ddp chapter", line="ddp  ", bound=9.0),
            _figure("the causes, and the process has ended"),
            _figure("the same of one clause", "--clause ddp.gradients.mean"),
            _figure("the same with --quick", "--quick --clause ddp.*"),
        )
    }


BENCHMARK = Answer()
