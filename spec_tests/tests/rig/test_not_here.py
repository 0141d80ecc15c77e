"""What the machine lacks is "not here" with advice; what the code does wrong stays a failure.

Both sides: an error of Triton's own may be a limit of its interpreter or a fault of the kernel, a
module that is not found may be a package to install or a submodule that was never written.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.chapters.attention import interpreter
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks import not_here
from spec_tests.rig.ranks.errors import RankRaised, RigError
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig.helpers import CHECKOUTS, judged, python, replaced

CS336 = CHECKOUTS / "cs336_2026"

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which is not installed"
)


# ---------------------------------------------------------------------------------------- Triton


def launch(ctx: Context, name: str, is_doubled: bool = False) -> torch.Tensor:
    """What the kernel called `name` makes of ones; without a name nothing is in a kernel."""
    kernels: Any = importlib.import_module("spec_tests.tests.rig.kernels")
    interpreter.mend()
    if not name:
        kernels.tl.arange(0, 16)
    x, out = torch.ones(16, 16), torch.zeros(16, 16)
    getattr(kernels, name)[(1,)](x, out, is_doubled, N=16)
    return out


@needs_triton
@pytest.mark.parametrize("is_doubled", [False, True])
def test_block_pointers_and_a_plain_bool_are_interpreted(module_worlds: Worlds, is_doubled: bool):
    (found,) = module_worlds.world(1).run(launch, "block_pointers", is_doubled)
    assert found.tolist() == [[1.0 + is_doubled] * 16] * 16


def launch_watched(ctx: Context) -> Any:
    """What is noted of a launch whose tensors come in descriptors."""
    kernels: Any = importlib.import_module("spec_tests.tests.rig.kernels")
    described = importlib.import_module("triton.tools.tensor_descriptor").TensorDescriptor
    interpreter.mend()
    x, out = (described.from_tensor(t, [16, 16]) for t in (torch.ones(16, 16), torch.zeros(16, 16)))
    with interpreter.watched() as launches:
        kernels.descriptors[(1,)](x, out, False, N=16)
    return launches, out.base


@needs_triton
def test_a_tensor_in_a_descriptor_is_one_that_was_passed(module_worlds: Worlds):
    (((launched,), found),) = module_worlds.world(1).run(launch_watched)
    assert launched["stored"] == found.sum() == 256
    assert not launched["outside"]


@needs_triton
def test_a_store_beyond_the_tensors_raises_before_it_harms(module_worlds: Worlds):
    # It was a "malloc(): invalid size", later and elsewhere, and a hang.
    with pytest.raises(
        RankRaised, match=r"stores 16 elements outside of the tensors.*in the last tile"
    ):
        module_worlds.world(1).run(launch, "beyond")


@needs_triton
def test_a_load_beyond_the_tensors_gives_zeros_and_not_the_heap(module_worlds: Worlds):
    # The set of clauses that failed was another one in each run.
    (found,) = module_worlds.world(1).run(launch, "reads_beyond")
    assert found.tolist() == [[1.0] * 16] * 15 + [[0.0] * 16]


@needs_triton
@pytest.mark.parametrize("kernel", ["device_function", "assembly", "tuned"])
def test_what_the_interpreter_cannot_do_is_not_here(module_worlds: Worlds, kernel: str):
    with pytest.raises(unittest.SkipTest, match=r"not here: run it on .* \(\w+\.py:\d+\)"):
        module_worlds.world(1).run(launch, kernel)


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("unknown_name", "no_such_name"),
        ("unknown_function", "no_such_function"),
        ("asserting", "0 active drivers"),
        ("", "Did you forget to add @triton"),
    ],
)
def test_what_triton_refuses_in_a_kernel_is_a_failure(
    module_worlds: Worlds, kernel: str, said: str
):
    with pytest.raises(RankRaised, match=said):
        module_worlds.world(1).run(launch, kernel)


def raised(file: str, statement: str) -> BaseException:
    """The error of a statement that stands in `file`."""
    try:
        exec(compile(statement, file, "exec"), {"InterpreterError": InterpreterError})
    except Exception as error:
        return error
    raise AssertionError("expected an error")


class InterpreterError(Exception):
    """As in Triton."""


INTERPRETER = "/site-packages/triton/runtime/interpreter.py"
LANGUAGE = "/site-packages/triton/language/core.py"


def within_a_kernel(statement: str) -> str:
    return (
        f"try:\n    {statement}\nexcept Exception as e:\n    raise InterpreterError(repr(e)) from e"
    )


IDIOMS, BUILD = "triton>=3.6,<3.8", "/site-packages/triton/runtime/build.py"
POINTERS = "raise RuntimeError('Block pointers have been removed in favor of the tensor ...')"
SCALARS = "raise TypeError('only 0-dimensional arrays can be converted to Python scalars')"
ITEMSIZE = "raise ValueError('numpy data itemsize (32 bits) exceeds dtype primitive_bitwidth')"
COMPILER = "raise RuntimeError('Failed to find C compiler. Please specify via CC')"
AGGREGATE = "type('_aggregate_type', (), {})().element_ty"


@pytest.mark.parametrize(
    ("file", "statement", "advice"),
    [
        (LANGUAGE, POINTERS, IDIOMS),
        ("mine.py", within_a_kernel(AGGREGATE), IDIOMS),
        (INTERPRETER, within_a_kernel(SCALARS), "'numpy<2.4'"),
        (INTERPRETER, ITEMSIZE, "CUDA device"),
        (BUILD, COMPILER, "install a C compiler"),
    ],
)
def test_an_error_is_recognised_by_its_words_and_its_place(file, statement, advice):
    assert advice in str(not_here.translated(raised(file, statement)))
    # The same words, spoken by the implementation.
    if file != "mine.py":
        error = raised("mine.py", statement)
        assert not_here.translated(error) is error


# ------------------------------------------------------------------------------ imports that fail


NEWER, OLDER, MINE = "use Python {} or newer", "use Python {} or older", "mine_too"
IMPORTS = {
    "from typing import override": NEWER.format("3.12"),
    "import typing; typing.override": NEWER.format("3.12"),
    "import annotationlib": NEWER.format("3.14"),
    "import distutils.core": OLDER.format("3.11"),
    "import no_such_package.part": "python -m pip install no_such_package",
    "from cs336_basics.model import Linear": "course's package cs336_basics is not in the",
    "from pytest import no_such_name": "another version of pytest is needed",
    "import importlib.metadata as m; m.version('no-such-package')": "pip install -e",
    "raise ImportError('libcudart.so: cannot open shared object file')": "does not fit this",
    # What the implementation lacks of itself, or lacks in the standard library by a misspelt name.
    f"import {MINE}.no_such_part": "",
    f"from {MINE} import no_such_name": "",
    "import os.no_such_part": "",
    "from . import part": "",
    # Merely after it, and not because of it.
    "try: import no_such_package\nexcept ImportError: raise ValueError": "",
}
"""Statement to the advice on what is not installed; none for a fault of the code."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of distutils, where it is
@pytest.mark.parametrize(("statement", "advice"), IMPORTS.items())
def test_what_is_not_installed_is_told_from_what_the_code_lacks(
    monkeypatch, tmp_path: Path, statement: str, advice: str
):
    (tmp_path / f"{MINE}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    try:
        error = raised("mine.py", statement)
    except AssertionError:
        assert "use Python" in advice, "expected an error"
        pytest.skip("this Python has it")
    found = not_here.translated(error)
    assert advice in str(found)
    assert advice or found is error
    assert not advice or "(mine.py:1)" in str(found)


def test_a_module_of_the_checkout_is_not_to_be_installed(tmp_path: Path):
    (tmp_path / "cs336_systems").mkdir()
    (tmp_path / "cs336_systems" / "of_mine.py").touch()
    error = raised(str(tmp_path / "tests" / "adapters.py"), "import of_mine")
    assert f"of_mine.py is in {tmp_path}/cs336_systems, which" in str(not_here.translated(error))


def test_at_load_the_advice_takes_the_place_of_a_traceback(own: Worlds, mine, tmp_path: Path):
    checkout = tmp_path / "checkout"
    shutil.copytree(CS336, checkout)
    replaced(
        checkout / "cs336_systems" / "fsdp.py",
        ("import functools\n", "import functools, no_such_package\n"),
    )
    mine("import no_such_package", "helper.py")
    for words, place in (
        (mine("import torch\nimport no_such_package.part\n").name, "(mine.py:2)"),
        (mine("from helper import x\n", "other.py").name, "(helper.py:1)"),
        (f"cs336:{checkout}", "(fsdp.py:3)"),
    ):
        with pytest.raises(RigError) as caught:
            own.world(1, impls.parse(words)).offered()
        assert str(caught.value).count("python -m pip install no_such_package") == 1
        assert place in str(caught.value)
    ended = python("-m", "spec_tests", "--impl", words)
    assert ended.returncode == 2
    assert ended.stderr.count("python -m pip install no_such_package") == 1, ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_package_of_the_course_that_is_missing_is_one_message(tmp_path: Path):
    checkout = tmp_path / "mine"
    shutil.copytree(CS336, checkout, ignore=shutil.ignore_patterns("cs336-basics"))
    importing = "from cs336_systems.fsdp import FSDP\n"
    lazily = (importing, ""), ("    return FSDP", f"    {importing}    return FSDP")
    replaced(checkout / "tests" / "adapters.py", *lazily)
    clauses = ("ddp.gradients.frozen-stay-none", "fsdp.backward.mean-gradient", "fsdp.forward.*")
    chosen = [word for each in clauses for word in ("--clause", each)]
    ended = python(
        *("-m", "spec_tests", "--impl", f"cs336:{checkout}", "--level", "course", *chosen)
    )
    said = "not here, 2 clauses: the course's package cs336_basics is not in the checkout"
    assert ended.stdout.count(said) == 1, ended.stdout
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout


def test_the_course_s_package_may_lie_where_the_project_file_says(own: Worlds, tmp_path: Path):
    checkout = tmp_path / "mine"
    shutil.copytree(CS336, checkout)
    (checkout / "cs336-basics").rename(checkout / "own")
    (checkout / "pyproject.toml").write_text('[tool.uv.sources]\ncs336-basics = {path = "own"}\n')
    # The course's models have parameters of this name alone.
    adapters = checkout / "tests" / "adapters.py"
    adapters.write_text(
        adapters.read_text()
        + "\ngather = fsdp_gather_full_params\n\n\ndef fsdp_gather_full_params(model):\n"
        "    return {name: p for name, p in gather(model).items() if name.endswith('.weight')}\n"
    )
    case = {"world": 2, "subject": "fsdp"}
    found = judged(impls.parse(f"cs336:{checkout}"), own, "fsdp.backward.mean-gradient", case)
    assert found.outcome is Outcome.PASSED, found.message
