"""Every command of the repository answers `--help`: `python -m X`, and each subcommand."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

from spec_tests import __main__ as command
from spec_tests.bench.__main__ import BENCHMARKS
from spec_tests.tests.reference import launch
from spec_tests.tests.rig.helpers import ROOT

NO_COMMANDS = {
    "checkouts": "a course's code",
}
HELPS = """
import contextlib, io, json, runpy, sys
found = {}
for words in json.loads(sys.argv[1]):
    module, *rest = words.split()
    sys.argv, said, status = [module, *rest, "--help"], io.StringIO(), "returned"
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            if module == "spec_tests":  # its entry point ends the process
                from spec_tests.__main__ import main
                status = main(sys.argv[1:])
            else:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code or 0
    except ModuleNotFoundError as error:
        status = f"lacks {error.name}"
    except BaseException as error:
        status = repr(error)
    found[words] = [status, said.getvalue()]
print(json.dumps(found))
"""


SKELETONS = "spec_tests.contract.skeletons."  # a learner's file: its end runs a toy on two ranks


def is_guard(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def modules() -> list[str]:
    """What `python -m` can start: every file with a guard, but those that are no commands."""
    found = []
    for path in sorted(
        each for top in ("spec_tests", "solution") for each in (ROOT / top).rglob("*.py")
    ):
        words = path.relative_to(ROOT).with_suffix("").parts
        if {*words} & {*NO_COMMANDS} or not any(map(is_guard, ast.parse(path.read_text()).body)):
            continue
        found.append(".".join(words).removesuffix(".__main__"))
    return [name for name in found if not name.startswith(SKELETONS)]


def test_every_command_answers_help(tmp_path: Path):
    subcommands = {"", *re.findall(r"python -m spec_tests (\w+) ", command.__doc__)}
    assert {*command.COMMANDS} < subcommands
    words = [f"spec_tests {name}".strip() for name in sorted(subcommands)]
    words += [f"spec_tests.bench {name}" for name in BENCHMARKS]
    words += modules()
    assert {"spec_tests.bench", "spec_tests.museum.duplicates"} < {*words}

    ended = launch.run(HELPS, json.dumps(words), folder=tmp_path)

    found = json.loads(ended.out.splitlines()[-1])
    bad = {
        name: (status, text)
        for name, (status, text) in found.items()
        if status != 0 or "usage" not in text
    }
    assert bad == {}
