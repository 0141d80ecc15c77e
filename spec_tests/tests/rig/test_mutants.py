"""Mutants: what is changed, how one is named and judged, and what bad arguments come to."""

from __future__ import annotations

import pytest

from spec_tests import museum
from spec_tests.museum import mutants
from spec_tests.programs import meter

TEXT = '''
def mean(parts, n: int = 1, *, is_sum: bool = False):
    """A docstring stays."""
    total = max(parts)
    for part in parts:
        if part and not is_sum:
            total.add_(part.clone())
    return total / n
'''
CHANGES = (
    "    pass\n    for part",  # a statement goes
    "total = min(parts)",
    "for part in list(parts)[:1]",
    "if not (part and (not is_sum))",
    "if True:",
    "if False:",
    "if part or (not is_sum)",
    "if part and is_sum",
    "total.add_(part)\n",
    "return total * n",
    "    return\n",
)


def test_each_kind_of_change_is_made_once():
    source = mutants.Source(TEXT)
    found = [f"{source.after(number)}\n" for number in range(len(source.changes))]
    assert source.before == mutants.Source(TEXT).before, "each change is taken back"
    # Where `unparse` sets parentheses is its own affair.
    bare = [text.replace("(", "").replace(")", "") for text in found]
    wanted = [text.replace("(", "").replace(")", "") for text in CHANGES]
    counts = {text: sum(text in each for each in bare) for text in wanted}
    assert counts == dict.fromkeys(wanted, 1), found
    assert len(found) == len(CHANGES) + 1  # the call in the branch goes as well
    assert "docstring" in source.before
    assert all("docstring" in each for each in found)
    for text in found:
        compile(text, "mutant", "exec")


def test_a_mutant_is_an_impostor_of_one_patch():
    mutant = mutants.of("solution.parallel.ddp", 0)
    card = museum.find(mutant.id)
    [(module, _, replace)] = card.patches
    assert (module, replace) == ("solution.parallel.ddp", mutant.after)
    assert card.does.count("\n-") == 1
    with pytest.raises(ValueError, match="expected a number below"):
        museum.find("mutant.solution.parallel.ddp.99999")


@pytest.mark.parametrize("module", ["solution.parallel.nothing", "json.decoder"])
def test_a_module_that_cannot_be_judged_is_wrong_usage(module: str, capsys):
    with pytest.raises(SystemExit) as ended:
        meter.main(["--of", module])
    assert ended.value.code == 2
    assert "expected a module " in (said := capsys.readouterr().err)
    assert f"got {module}" in said.replace("'", "")


def test_a_mutant_that_never_averages_falls_to_a_situation():
    module = "solution.parallel.reducer"
    every = (mutants.of(module, n) for n in range(len(mutants.source(module).changes)))
    mutant = next(m for m in every if "if not not self.is_sending" in m.after)
    said = meter.told_by(mutant, seconds=30, clauses=False)
    assert said.startswith("seed: ddp")
