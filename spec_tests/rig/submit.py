"""`trainspec submit cs336:PATH OUT.zip`: judge a course's checkout and pack it for a hand-in.

    python -m spec_tests submit cs336:path/to/assignment2-systems submission.zip
    python -m spec_tests submit effdl:fsdp.py submission.zip --level course

1. Where the checkout has tests of its own (`tests/test_*.py`), pytest runs them there.
2. The suite judges it, with the points of its course. Options that are not listed go to `check`.
3. The archive gets the checkout without caches, data, weights and hidden files;
   `test_results.xml`, JUnit of the course's tests; and `trainspec/`, the report: `junit.xml`,
   `results.json` for Gradescope, `index.html` to read.

A failing checkout is packed all the same. Exit status: 0 every MUST clause of the level holds, 1
one does not, 2 nothing was packed. What the course's own tests came to is printed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from spec_tests.impls import LAYOUTS, parse
from spec_tests.rig.target import REPOSITORY_ROOT

FOLDERS = {"__pycache__", "build", "node_modules", "outputs", "venv", "wandb"}
SUFFIXES = {
    *(".bin", ".ckpt", ".gz", ".npy", ".npz", ".nsys-rep", ".pickle", ".pkl", ".pt", ".pth"),
    *(".pyc", ".safetensors", ".sqlite", ".tar", ".zip"),
}
LARGEST = 100 * 10**6  # bytes that Gradescope takes


def files(root: Path) -> Iterator[Path]:
    """Yield what belongs into a hand-in, of a folder or a single file."""
    if root.is_file():
        yield root
        return
    for folder, names, found in os.walk(root):
        kept = {name for name in names if name[0] != "." and name not in FOLDERS}
        names[:] = sorted(name for name in kept if not name.endswith(".egg-info"))
        for path in (Path(folder, name) for name in sorted(found)):
            is_data = path.suffix in SUFFIXES or path.is_symlink()
            if path.name[0] != "." and not is_data and path.is_file():
                yield path


def pack(root: Path, report: Path, out: Path) -> None:
    """Write the archive whole: the checkout's files and those of the report."""
    within = root if root.is_dir() else root.parent
    partial = out.with_name(f".{out.name}.partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in files(root):
            if path.resolve() not in (out.resolve(), partial.resolve()):
                archive.write(path, path.relative_to(within))
        for path in files(report):
            archive.write(path, path.relative_to(report))
    partial.replace(out)


def _run_course_tests(root: Path, report: Path) -> None:
    """Run the checkout's own tests, if it has any, as its course does."""
    tests = root / "tests"
    if not any(tests.glob("test_*.py")):
        print("tests of the course: none in the checkout")
        return
    command = ["-m", "pytest", "tests", "-q", f"--junitxml={report / 'test_results.xml'}"]
    status = subprocess.run([sys.executable, *command], cwd=root, check=False).returncode
    print(f"tests of the course: {'passed' if not status else f'failed, status {status}'}")


def main(arguments: Sequence[str]) -> int:
    """The command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m spec_tests submit",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("checkout", help=f"{', '.join(f'{each}:PATH' for each in LAYOUTS)}")
    parser.add_argument("out", type=Path, help="the archive to write, OUT.zip")
    flags, rest = parser.parse_known_args(arguments)
    try:
        target = parse(flags.checkout)
    except ValueError as error:
        parser.error(str(error))
    if target.layout is None or target.path is None:
        parser.error(f"expected a course's checkout, {', '.join(LAYOUTS)}, got {flags.checkout}")
    if flags.out.suffix != ".zip" or not flags.out.parent.is_dir():
        parser.error(f"expected OUT.zip in a folder that exists, got {flags.out}")
    with tempfile.TemporaryDirectory(prefix="trainspec-") as scratch:
        report = Path(scratch)
        _run_course_tests(target.path, report)
        command = ["--impl", flags.checkout, "--report", str(report / "trainspec"), *rest]
        command += [] if "--points" in rest else ["--points", target.layout]
        status = subprocess.run(
            [sys.executable, "-m", "spec_tests", *command], env=_environment(), check=False
        ).returncode
        if status not in (0, 1):
            print("nothing was packed: the run was broken", file=sys.stderr)
            return 2
        pack(target.path, report, flags.out)
    size = flags.out.stat().st_size
    print(f"{flags.out}: {size / 1e6:.1f} MB")
    if size > LARGEST:
        print(f"warning: Gradescope takes {LARGEST / 1e6:.0f} MB", file=sys.stderr)
    return status


def _environment() -> dict[str, str]:
    """Return this process's variables; a checkout of the suite need not be installed."""
    found = [str(REPOSITORY_ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))}
