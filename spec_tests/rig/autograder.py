"""`trainspec autograder DIR`: what Gradescope or a GitHub classroom needs to judge each hand-in.

    python -m spec_tests autograder grader --course cs336 --install 'trainspec[test] @ git+URL'

| file | for |
|---|---|
| setup.sh | Gradescope, once: installs Python's packages |
| run_autograder | Gradescope, each hand-in: judges it and leaves results.json |
| trainspec.yml | a GitHub classroom: put it into `.github/workflows` of the template |

Upload the first two as one zip. A hand-in is searched for the course's files, so that it may lie in
a folder of its archive. It gets `--cpus` processors with one thread per rank, and `--minutes`;
then the run ends and what it came to is reported INCOMPLETE, without points. Code is judged in the
same container: nothing keeps code that means harm from it, so look at what has full points.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

from spec_tests.impls import LAYOUTS
from spec_tests.rig.report.templates import of_texts

_TEMPLATES = Path(__file__).with_name("handin")
_TORCH = "--extra-index-url https://download.pytorch.org/whl/cpu"
_SETUP_MINUTES = 10


def texts(
    course: str, install: str, cpus: int, minutes: int, rest: Sequence[str]
) -> dict[str, str]:
    """Return the text of each file by name; `rest` are more options of `check`."""
    options = shlex.join(["--points", course, "-n", str(cpus), *rest])
    words = {
        "command": f'timeout --kill-after=60 {minutes}m "$PYTHON" -m spec_tests {options}',
        "limit": f"taskset -c 0-{cpus - 1}",
        "course": course,
        "files": " ".join(LAYOUTS[course]),
        "install": shlex.quote(install),
        "torch": _TORCH,
        "total": minutes + _SETUP_MINUTES,
    }
    forms = of_texts(_TEMPLATES)
    return {
        name.removesuffix(".jinja"): forms.get_template(name).render(words)
        for name in forms.list_templates()
    }


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests autograder",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", type=Path, help="a new folder")
    add("--course", choices=[*LAYOUTS], default="cs336", help="whose layout (default: cs336)")
    add("--install", required=True, help="how pip names this suite: an index's name, a git URL")
    add("--cpus", type=int, default=2, help="processors of one hand-in (default: 2)")
    add("--minutes", type=int, default=20, help="time of one hand-in (default: 20)")
    flags, rest = parser.parse_known_args(arguments)
    if flags.cpus < 1 or flags.minutes < 1:
        parser.error(f"expected --cpus and --minutes >= 1, got {flags.cpus}, {flags.minutes}")
    try:
        flags.folder.mkdir(parents=True)
    except FileExistsError:
        parser.error(f"expected a new folder, got {flags.folder}")
    found = texts(flags.course, flags.install, flags.cpus, flags.minutes, rest)
    for name, text in found.items():
        path = flags.folder / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o644 if name.endswith(".yml") else 0o755)
        print(path)
    return 0
