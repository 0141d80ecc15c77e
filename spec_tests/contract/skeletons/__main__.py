"""The command that writes a skeleton: `python -m spec_tests new ddp DIR`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from spec_tests.contract.skeletons import SUBJECTS, __doc__, tasks, text_of


def main(arguments: Sequence[str]) -> int:
    """The command; 0 if the file was written."""
    parser = argparse.ArgumentParser(prog="python -m spec_tests new", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("subject", choices=SUBJECTS)
    parser.add_argument("directory", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    place = options.directory / f"{options.subject}.py"
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
        with place.open("x", encoding="utf-8") as file:  # "x": never over what is there
            file.write(text_of(options.subject, place))
    except FileExistsError:
        print(
            f"expected to write {place}, but there is something of that name already; nothing was "
            "changed. Give another folder, or move it away",
            file=sys.stderr,
        )
        return 2
    first = " ".join(f"--clause '{p}'" for p in tasks(place.read_text(encoding="utf-8"))[0])
    print(f"wrote {place}: read it from the top, then do task 1 and judge it with\n")
    print(f"    python -m spec_tests --impl {place} {first}\n")
    print(f"and all of it with\n\n    make check IMPL={place}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
