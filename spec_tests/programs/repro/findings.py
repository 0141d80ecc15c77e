"""From a finding (`impls/findings`) to a script that runs alone, for maintainers."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from spec_tests.impls.findings import Finding, named
from spec_tests.programs.repro.script import TEMPLATES, kept, with_needed_imports, written
from spec_tests.programs.repro.situations import recipe_of

_ONE_PROCESS = "what one process computes with the batches of all ranks"


def script(finding: Finding) -> str:
    """Return a script that shows it with torch, or the library, alone."""
    if "situation" in finding.entry:
        line, ranks = finding.entry["situation"], finding.entry.get("ranks", 2)
        recipe = recipe_of(line, finding.entry["judges"], ranks, is_torchs=True)
        return written(recipe, _head(finding), is_short=False)
    return _of_body(finding)


def _of_body(finding: Finding) -> str:
    entry = finding.entry
    imports, body = _parted(entry["body"].strip())
    kind = "ends" if "ends" in entry else "ranks" if "ranks" in entry else "alone"
    settings = [f"RANKS = {entry['ranks']}"] if "ranks" in entry else []
    if kind == "ends":
        settings += ["SECONDS = 20", f"RIGHT = {tuple(entry['ends'])}"]
    else:
        settings += [f"EXPECTED = {entry['returns']}"]
    variables = entry.get("environment", {}).items()
    environment = "".join(f"os.environ[{k!r}] = {v!r}\n" for k, v in variables)
    text = kept((TEMPLATES / "finding.txt").read_text(encoding="utf-8"), frozenset({kind}))
    text = text.replace("SETTINGS", "\n".join(settings))
    text = text.replace("LIBRARY\n", f"{imports}\n" if imports else "")
    text = text.replace("ENVIRONMENT\n\n", f"{environment}\n" if environment else "")
    text = text.replace("BODY", textwrap.indent(body, "    "), 1)
    text = re.sub(r"\n{4,}", "\n\n\n", with_needed_imports(text))
    return text.replace("HEAD", _head(finding), 1)


def _head(finding: Finding) -> str:
    """Return the docstring: what is expected and got, since when, and where it is known."""
    entry, told = finding.entry, finding.deviation()
    since = f"; declared of torch {told.when}" if told and told.when else ""
    lines = [
        f"Expected: {entry.get('expected', _ONE_PROCESS)}",
        f"Got: {entry['got']}",
        f"Checked: {entry['checked']}{since}",
        f"Clause: {entry['clause']}",
    ]
    if "situation" in entry:
        lines.append(f"Situation: {entry['situation']}")
    if "known" in entry:
        lines.append(f"Known: {entry['known']}")
    elif told and told.link:
        lines.append(f"See: {told.link}")
    said = "\n".join(textwrap.fill(line, 98, break_long_words=False) for line in lines)
    return f"{textwrap.fill(entry['what'], 98)}\n\n{said}\n"


def write(pattern: str, directory: Path) -> list[Path]:
    """Write the scripts of the findings whose names match, and return their paths.

    Raises:
        ValueError: There is no such finding, or a file of that name exists already.
    """
    scripts = {directory / f"{each.name}.py": script(each) for each in named(pattern)}
    if taken := [str(path) for path in scripts if path.exists()]:
        raise ValueError(f"expected to write {', '.join(taken)}, which exist; nothing was changed")
    directory.mkdir(parents=True, exist_ok=True)
    for path, text in scripts.items():
        path.write_text(text, encoding="utf-8")
    return [*scripts]


def _parted(body: str) -> tuple[str, str]:
    """Return the imports at the beginning of a body, and the rest."""
    lines = body.splitlines()
    is_import = [line.startswith(("import ", "from ")) for line in lines]
    first = is_import.index(False)
    return "\n".join(lines[:first]), "\n".join(lines[first:]).strip("\n")
