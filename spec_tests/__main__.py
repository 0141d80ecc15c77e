"""`python -m spec_tests --impl A --impl B --report DIR`: judge implementations.

    python -m spec_tests [check] [--help]       judge the reference; what may be asked for
    python -m spec_tests check mine.py          judge a file, at level `correct`: --impl mine.py
    python -m spec_tests --impl mine.py --clause 'ddp.gradients.*' --level course
    python -m spec_tests compare BEFORE AFTER   two reports: what got better, what broke
    python -m spec_tests report DIR             the ending of a log, also of a run that was killed
    python -m spec_tests ledger [--check]       write (or compare) CLAUSES.md and the museum
    python -m spec_tests impostors [...]        see that the suite has teeth
    python -m spec_tests signatures [...]       see what each near-miss fails: known faults
    python -m spec_tests new ddp DIR            a file to begin with, the algorithm in steps
    python -m spec_tests repro [...] DIR        a script that shows one finding, with torch alone
    python -m spec_tests explore [...]          draw situations until one fails, and shrink it
    python -m spec_tests mutants [...]          judge small changes of a module, made by machine
    python -m spec_tests league [...]           the table of the libraries that were judged
    python -m spec_tests bench NAME [...]       time and memory, beside PyTorch's own
    python -m spec_tests watch [...] -- COMMAND  judge a training script while it trains
    python -m spec_tests submit cs336:PATH OUT.zip  judge a course's checkout, pack the hand-in
    python -m spec_tests autograder DIR [...]   files for Gradescope and GitHub that judge hand-ins

An installed package offers the same as `trainspec check`, `trainspec new` and so on. `COMMAND
--help` lists a command's own options; whatever else `check` is given goes to pytest, such as
`-n 2` and `-x`. Runs in any interpreter that has the suite and the implementation's dependencies.

Exit status: 0 every MUST clause at or below the level holds for what the implementation offers, or
is a declared deviation; 1 one does not; 2 the run itself is broken: wrong usage, nothing ran, an
implementation that does not load.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import io
import itertools
import os
import signal
import sys
import tempfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

# Subcommand to the module whose `main` takes its arguments.
COMMANDS = {
    "autograder": "spec_tests.rig.autograder",
    "bench": "spec_tests.bench.__main__",
    "compare": "spec_tests.rig.report.compare",
    "explore": "spec_tests.programs.explore",
    "mutants": "spec_tests.programs.meter",
    "league": "spec_tests.impls.league",
    "new": "spec_tests.contract.skeletons.__main__",
    "report": "spec_tests.rig.report.command",
    "repro": "spec_tests.programs.repro.__main__",
    "signatures": "spec_tests.museum.signatures",
    "submit": "spec_tests.rig.submit",
    "watch": "spec_tests.watch.command",
}


def main(arguments: list[str]) -> int:
    """Dispatch to a subcommand or to pytest; returns the exit status."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    command, rest = "".join(arguments[:1]), arguments[1:]
    if command in COMMANDS:
        return int(import_module(COMMANDS[command]).main(rest))
    if command == "ledger":
        return _ledger(rest)
    if command == "impostors":
        return _impostors(rest)
    if command in ("-h", "--help"):
        print(f"{__doc__}\nOptions of check:\n\n{_options()}")
        return 0
    judged = _with_impl(rest) if command == "check" else arguments
    if {"-h", "--help"} & {*judged}:
        print(f"usage: python -m spec_tests [check] [options, also of pytest]\n\n{_options()}")
        return 0
    return _judge(judged)


def _with_impl(arguments: list[str]) -> list[str]:
    """`check mine.py` judges that file: what stands before the first option is implementations."""
    names = list(itertools.takewhile(lambda each: not each.startswith("-"), arguments))
    return [*(f"--impl={name}" for name in names), *arguments[len(names) :]]


def _options() -> str:
    """The options of the plugin, out of the many that pytest has."""
    import pytest

    with contextlib.redirect_stdout(io.StringIO()) as shown:
        pytest.main([*_PYTEST, "--help"])
    _, _, ours = shown.getvalue().partition("specification of data-parallel training:\n")
    return ours.partition("\n\n")[0]


def trainspec() -> NoReturn:
    """Run the command of that name and end; the entry point of the installed package."""
    try:
        status = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print("stopped: the output was closed, nobody reads the rest", file=sys.stderr)
        status = 2
    # All that was started is stopped by now. The interpreter's own end, which takes every module of
    # torch apart, keeps a shell waiting for another second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _impostors(arguments: list[str]) -> int:
    if arguments == ["--serve"]:
        # First: it preloads while this process imports. Without it every rank imports for itself,
        # a second each. All ranks are on a CPU, where kernels are interpreted.
        from spec_tests.rig.ranks.zygote import rank_environment, start_zygote

        os.environ.update(rank_environment("gloo"))
        start_zygote("spec_tests.museum.preload")
    from spec_tests.museum.command import main as impostors

    return impostors(arguments)


def _ledger(arguments: list[str]) -> int:
    from spec_tests import museum
    from spec_tests.museum import page
    from spec_tests.programs import seeds
    from spec_tests.rig import ledger
    from spec_tests.rig.target import REPOSITORY_ROOT
    from spec_tests.tests.rig.watched import told_by
    from spec_tests.watch.command import norms

    parser = argparse.ArgumentParser(
        prog="python -m spec_tests ledger", description="Write CLAUSES.md, the museum, the counts."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if one is stale")
    flags = parser.parse_args(arguments)
    clauses = ledger.load_all()
    unknown = {*museum.rejected_by()} - {clause.id for clause in clauses}
    if unknown:
        print(f"impostors name clauses that do not exist: {', '.join(sorted(unknown))}")
        return 2
    pages = {
        ledger.PATH: ledger.render(
            clauses,
            {**museum.rejected_by(), **told_by()},
            norms(),
            seeds.formerly_clauses(seeds.load()),
        ),
        page.PATH: page.render(clauses),
    }
    readme = REPOSITORY_ROOT / "README.md"
    if readme.is_file():
        counts = museum.counts()
        pages[readme] = ledger.with_counts(readme.read_text(), ledger.load_all(), *counts)
    stale = [path for path, text in pages.items() if _text_of(path) != text]
    for path in stale:
        if not flags.check:
            path.write_text(pages[path])
        print(f"stale: {path}; run python -m spec_tests ledger" if flags.check else f"wrote {path}")
    return int(flags.check and bool(stale))


def _text_of(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _judge(arguments: list[str]) -> int:
    from spec_tests.rig.progress import Progress
    from spec_tests.rig.ranks.zygote import start_zygote

    start_zygote()  # first: it imports torch while this process does so
    shown = Progress.start()
    # As Ctrl-C does: the ending is written, INCOMPLETE. Whoever cannot wait for it sends SIGKILL.
    signal.signal(signal.SIGTERM, shown.interrupt)
    try:
        return _run(arguments)
    except KeyboardInterrupt:
        print("interrupted: no verdict", file=sys.stderr)
        return 2
    finally:
        shown.close()


def _run(arguments: list[str]) -> int:
    import pytest

    from spec_tests.rig.ledger import chapter_folders
    from spec_tests.rig.report import forget
    from spec_tests.rig.report.eventlog import read_log

    flags = _flags(arguments)
    asked = ",".join(filter(None, flags.clause))
    folders = chapter_folders([each for each in asked.split(",") if each])
    with tempfile.TemporaryDirectory(prefix="trainspec-") as scratch:
        directory = flags.report or scratch
        log = Path(directory) / "events.jsonl"
        forget(directory)  # of a run that does not even load, nothing older may speak
        own = [] if flags.report else ["--report", scratch, "--report-is-scratch"]
        impl = [] if flags.impl else ["--impl", "solution"]
        status = pytest.main([*_PYTEST, *impl, *own, *arguments, *map(str, folders)])
        events = read_log(log) if log.is_file() else []
    if events and events[-1]["event"] == "footer":
        return int(events[-1]["exit_status"])
    if status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        print("the run ended without a verdict", file=sys.stderr)
    return 2


def _flags(arguments: list[str]) -> argparse.Namespace:
    """Return what is read here as it was given; whether it and the rest are right, pytest says."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--impl", action="append", default=[], nargs="?")
    parser.add_argument("--report", nargs="?")
    parser.add_argument("--clause", action="append", default=[], nargs="?")
    return parser.parse_known_args(arguments)[0]


# Nothing of the user's own pytest configuration applies, nor plugins that happen to be installed: a
# verdict does not depend on where the command was started. Messages are the clauses' own, so pytest
# need not rewrite assertions, which takes two seconds where it may not cache them.
# Others are asked for with -p.
_PLUGINS = {"xdist": "xdist", "timeout": "pytest_timeout", "hypothesispytest": "hypothesis"}
_PYTEST = [
    "-c",
    os.devnull,
    "--rootdir",
    str(Path(__file__).resolve().parent.parent),
    # Else folders above the suite are searched, and their conftest.py files are run.
    "--confcutdir",
    str(Path(__file__).resolve().parent.parent),
    "--import-mode=importlib",
    "--assert=plain",
    "--disable-plugin-autoload",
    "-pspec_tests.rig.plugin",
    *(f"-p{entry}" for entry, package in _PLUGINS.items() if find_spec(package)),
    "-p",
    "no:cacheprovider",
    "-p",
    "no:logging",  # of this process, in which nothing of the implementation runs
    "-q",
    "--live",
    "--tb=no",  # the plugin prints each clause's own message, once
    "-rN",
    "--no-header",
    "-o",
    "xfail_strict=true",
]


if __name__ == "__main__":
    trainspec()
