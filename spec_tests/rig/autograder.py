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

TORCH = "--extra-index-url https://download.pytorch.org/whl/cpu"
SETUP = """#!/usr/bin/env bash
# Gradescope runs this once, when the image is built. The CPU build of torch: ranks live on the CPU.
set -euo pipefail
apt-get update -qq
apt-get install -qq -y --no-install-recommends git python3 python3-venv >/dev/null
python3 -m venv /opt/trainspec
/opt/trainspec/bin/pip install {torch} {install}
"""
RUN = """#!/usr/bin/env bash
# Gradescope runs this for every hand-in: submission/ is judged, results/results.json is shown.
set -uo pipefail
ROOT=${{AUTOGRADER:-/autograder}}
PYTHON=${{PYTHON:-/opt/trainspec/bin/python}}
export OMP_NUM_THREADS=1
mkdir -p "$ROOT/results"
# zero WORDS: no points, and why.
zero() {{ printf '{{"score": 0, "output": "%s"}}\\n' "$1" >"$ROOT/results/results.json"; }}
limit="{limit}"
$limit true 2>/dev/null || limit=  # a container may have other processors than the first
checkout=
for name in {files}; do
  file=$(cd "$ROOT/submission" && find . -path "*/$name" -not -path '*/.?*/*' | sort | head -n 1)
  if [ -n "$file" ]; then checkout=$ROOT/submission/${{file%"$name"}} && break; fi
done
if [ -z "$checkout" ]; then zero "expected one of {files} in the hand-in, found none" && exit; fi
$limit {command} --impl "{course}:$checkout" --report "$ROOT/report"
cp "$ROOT/report/results.json" "$ROOT/results/results.json" || zero "no verdict: see the log"
"""
WORKFLOW = """name: trainspec
on: [push, workflow_dispatch]
permissions:
  contents: read
jobs:
  judge:
    runs-on: ubuntu-latest
    timeout-minutes: {total}
    env:
      OMP_NUM_THREADS: "1"
      PYTHON: python
    steps:
      - uses: actions/checkout@v4
      - uses: actions/setup-python@v5
        with:
          python-version: "3.12"
      - run: |
          pip install {torch} {install}
      - run: |
          {limit} {command} --impl {course}:. --report trainspec-report
      - if: always()
        run: cat trainspec-report/summary.md >>"$GITHUB_STEP_SUMMARY"
      - if: always()
        uses: actions/upload-artifact@v4
        with:
          name: trainspec-report
          path: trainspec-report
"""
SETUP_MINUTES = 10


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
        "torch": TORCH,
        "total": minutes + SETUP_MINUTES,
    }
    forms = {"setup.sh": SETUP, "run_autograder": RUN, "trainspec.yml": WORKFLOW}
    return {name: form.format_map(words) for name, form in forms.items()}


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
