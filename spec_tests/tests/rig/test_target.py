"""What `--impl` takes, how a rank loads it, and what is said about one that cannot be loaded."""

from pathlib import Path

import pytest

from spec_tests import impls
from spec_tests.contract import DEFAULTS, FUNCTIONS
from spec_tests.rig import target
from spec_tests.rig.ranks.errors import RigError
from spec_tests.rig.ranks.pool import Pool
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig import bodies

OFFER = "def ddp(module, *, process_group=None):\n    return module\n"


def load_error(worlds: Worlds, which: target.Target) -> str:
    """What a rank says when it fails to load `which`."""
    error = worlds.pool(1, which, "gloo").load_error
    assert error is not None
    return f"{error.kind}: {error.message}\n{error.text}"


# --------------------------------------------------------------------------------------- the words


TORCH = target.PACKAGE_ROOT / "impls" / "torch.py"


@pytest.mark.parametrize(
    ("words", "module", "path", "expectations"),
    [
        ("solution", "solution", target.REPOSITORY_ROOT / "solution", None),
        ("torch", "trainspec_impl_torch", TORCH, TORCH.with_suffix(".toml")),
        ("plain", "spec_tests.plain", None, None),
        ("email.message", "email.message", None, None),
        ("impostor:ddp.sum-for-mean", "solution", None, None),
    ],
)
def test_what_is_known_or_importable_is_found(words: str, module: str, path, expectations):
    found = impls.parse(words)
    assert (found.name, found.module) == (words, module)
    if path is not None:
        assert found.path == path
        assert path.exists()
    if words != "solution":
        assert found.expectations == expectations
    assert found.impostor == (words.partition(":")[2] or None)


def test_a_library_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(impls.LEAGUE, "accelerate", ("no_such_module", "accelerate"))
    with pytest.raises(ValueError, match=r"^--impl accelerate: install \w+: pip install acc"):
        impls.parse("accelerate")
    monkeypatch.setitem(impls.LEAGUE, "deepspeed_2", ("no_such_module", "deepspeed"))
    with pytest.raises(ValueError, match=r"^--impl deepspeed_2: install deepspeed"):
        impls.parse("deepspeed:2")


@pytest.mark.parametrize(
    ("words", "module", "path", "deviations"),
    [
        *(
            (words, "trainspec_impl_mine", "mine.py", "mine.toml")
            for words in ("mine.py", "./mine.py", "{folder}/mine.py")
        ),
        *(
            (words, "pack", "pack", "pack/expectations.toml")
            for words in ("{folder}/pack", "{folder}/pack/", "{folder}/pack/__init__.py")
        ),
    ],
)
def test_a_file_or_package_is_meant_from_the_present_folder_with_its_deviations(
    mine, tmp_path: Path, monkeypatch, words: str, module: str, path: str, deviations: str
):
    for name in ("mine.py", "pack/__init__.py"):
        mine(OFFER, name)
    monkeypatch.chdir(tmp_path)
    found = impls.parse(words := words.format(folder=tmp_path))
    assert (found.name, found.module, found.path) == (words, module, tmp_path / path)
    assert found.expectations == tmp_path / deviations


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("nowhere", "--impl 'nowhere': expected 'solution', 'torch', 'plain', an importable"),
        ("no.such.module", "no such module was found. For a file give its path with the ending"),
        ("", "--impl '': expected"),
        ("missing.py", "--impl 'missing.py': expected a .py file or a package folder, found"),
        ("no/such/folder", "found nothing at"),
        ("empty/", "found a folder without __init__.py at"),
        ("./notes.txt", "expected a .py file or a package folder"),
    ],
)
def test_what_names_nothing_is_refused_with_what_was_expected(
    tmp_path: Path, monkeypatch, spec: str, said: str
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as caught:
        impls.parse(spec)
    assert said in str(caught.value)


# ----------------------------------------------------------------------------------------- loading

MANY = "import os\nfor _ in range(2000):\n    print('x' * 100)\nos.write(2, b'y' * 100_000)\n"
HELPED = "import trainspec_helper\ndef ddp(module):\n    return trainspec_helper.WORD\n"
INSIDE = "from pack.inner import WORD\nfrom .inner import WORD as SAME\n"
PACKAGE = {
    "pack/inner.py": "from . import outer\nWORD = outer.WORD\n",
    "pack/outer.py": "WORD = 'inside'\n",
    "pack/__init__.py": INSIDE + "def ddp(module):\n    return WORD, SAME\n",
}


@pytest.mark.parametrize(
    ("files", "named", "returned"),
    [
        ({"trainspec_helper.py": "WORD = 'helped'", "mine.py": HELPED}, "mine.py", "helped"),
        (PACKAGE, "pack", ("inside", "inside")),
        ({"ddp.py": OFFER}, "ddp.py", "x"),
        ({"mine.py": MANY + OFFER}, "mine.py", "x"),
    ],
    ids=["imports its neighbour", "imports its parts", "called like a module", "prints"],
)
def test_what_loads_is_the_same_on_all_ranks(
    own: Worlds, mine, tmp_path: Path, files: dict[str, str], named: str, returned: object
):
    for name, text in files.items():
        mine(text, name)
    world = own.world(2, impls.parse(str(tmp_path / named)))
    assert world.run(bodies.call_ddp, "x") == [returned] * 2


def test_a_package_called_solution_elsewhere_is_no_clash(own: Worlds, mine):
    mine("WORD = 'theirs'\n", "solution/part.py")
    text = "from solution.part import WORD\ndef ddp(module):\n    return WORD\n"
    theirs = mine(text, "solution/__init__.py")
    assert own.world(1, theirs).run(bodies.call_ddp) == ["theirs"]
    assert "ddp_bucketed" in own.world(1, impls.parse("solution")).offered()
    assert own.world(1, theirs).offered() == ("ddp",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module_at_all\n", "ModuleNotFoundError: No module named 'no_such_module"),
        ("raise SystemExit(3)\n", "SystemExit: 3"),
        ("def ddp(:\n", "SyntaxError"),
        ("x = 1\n1 / 0\n", 'mine.py", line 2'),
        ("x = 1\n", "offers none of the contract's functions; expected at least one of ddp, ddp_b"),
        ("ddp = 3\n", "offers none of the contract's functions"),
    ],
    ids=["import error", "exits", "syntax", "its line", "nothing offered", "no function"],
)
def test_what_does_not_load_is_an_error_and_not_an_absence(own: Worlds, mine, text, said: str):
    which = mine(text)
    assert said in load_error(own, which)
    with pytest.raises(RigError, match=r"mine\.py does not load: "):
        own.world(1, which).run(bodies.call_ddp)
    with pytest.raises(RigError, match="does not load"):
        own.world(1, which).offered()


def test_an_impostor_that_does_not_exist_is_named_with_those_that_are_near(own: Worlds):
    said = load_error(own, impls.parse("impostor:ddp.sum-for-meen"))
    assert "no impostor 'ddp.sum-for-meen'; close to it: ddp.sum-for-mean" in said


# ---------------------------------------------------------------- what cannot be called as promised


@pytest.mark.parametrize(
    ("signature", "said"),
    [
        ("ddp(model)", ""),
        ("ddp(module, process_group=None)", ""),
        ("ddp(*args, **kwargs)", ""),
        ("ddp()", "ddp(module), got ddp(): too many positional arguments"),
        ("ddp(*, module)", "ddp(module), got ddp(*, module): too many positional arguments"),
        ("ddp(model, group)", "got ddp(model, group): missing a required argument: 'group'"),
        ("ddp_bucketed(module, size_mb)", "called as ddp_bucketed(module, bucket_size_mb=)"),
    ],
)
def test_a_function_that_cannot_take_what_every_caller_passes_is_a_misfit(
    mine, signature: str, said: str
):
    misfits = target.load(mine(f"def {signature}:\n    return 0\n")).misfits
    assert list(misfits) == ([signature.partition("(")[0]] if said else [])
    for name, reason in misfits.items():
        assert said in reason
        assert f"expected a function that can be called as {name}(module" in reason
        assert reason.endswith(f"; see `{name}` in spec_tests/contract/parallel.py")


@pytest.mark.parametrize("name", ["solution", *impls.KNOWN_IMPLEMENTATIONS])
def test_what_comes_with_the_suite_fits_and_changes_nothing_at_import(own: Worlds, name: str):
    if name in impls.LEAGUE and not impls.is_installed(name):
        pytest.skip(f"needs {impls.LEAGUE[name][1]}")
    which = impls.parse(name)
    assert own.world(1, which).misfits() == {}
    pool = own.pool(1, which, "gloo")
    assert isinstance(pool, Pool)
    assert pool.leaks == () or name in impls.LEAGUE  # what a library changes is its own affair


# ------------------------------------------------------------------------------ what is not offered


def test_every_function_of_the_contract_is_there_or_says_that_it_is_not(mine):
    found = target.load(mine(OFFER, "trainspec_test_of_offers.py"))
    assert found.offered == ("ddp",)
    assert found.ddp(4) == 4
    for name in FUNCTIONS.keys() - {"ddp"} - DEFAULTS.keys():
        with pytest.raises(target.NotOfferedError, match=rf"does not offer {name}\(\)"):
            getattr(found, name)(1, any_keyword=2)
    for name, default in DEFAULTS.items():
        assert getattr(found, name) is default
    with pytest.raises(AttributeError, match="'dpd' is no function of the contract"):
        _ = found.dpd


def test_a_world_without_implementation_says_so(worlds: Worlds):
    with pytest.raises(Exception, match="this world has no implementation"):
        worlds.world(1).run(bodies.call_ddp)
