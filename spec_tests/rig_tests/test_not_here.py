"""What the machine lacks is "not here" with advice; what the code does wrong stays a failure.

Both sides: an error of Triton's own may be a limit of its interpreter or a fault of the kernel, a
module that is not found may be a package to install or a submodule that was never written.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_tests import target
from spec_tests.attention import interpreter, test_refusals
from spec_tests.clause import clause_of
from spec_tests.ddp import test_gradients
from spec_tests.rig import not_here, runner
from spec_tests.rig.errors import RankRaised
from spec_tests.rig.missing import missing
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.rank import Context
from spec_tests.rig.world import Worlds

CS336 = Path(__file__).parent / "checkouts" / "cs336_2026"
MEAN = clause_of(test_gradients.test_every_rank_holds_the_mean_gradient)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton, which is not installed"
)


@pytest.fixture(scope="module")
def own():
    worlds = Worlds()
    yield worlds
    worlds.close()


# ---------------------------------------------------------------------------------------- Triton


def launch(ctx: Context, name: str, is_doubled: bool = False) -> torch.Tensor:
    """What the kernel called `name` makes of ones."""
    kernels: Any = importlib.import_module("spec_tests.rig_tests.kernels")
    interpreter.mend()
    x, out = torch.ones(16, 16), torch.zeros(16, 16)
    getattr(kernels, name)[(1,)](x, out, is_doubled, N=16)
    return out


def on_the_host(ctx: Context) -> None:
    """A function of Triton's language outside of any kernel."""
    import triton.language as tl

    tl.arange(0, 16)


@needs_triton
@pytest.mark.parametrize("is_doubled", [False, True])
def test_block_pointers_and_a_plain_bool_are_interpreted(own: Worlds, is_doubled: bool):
    (found,) = own.world(1).run(launch, "block_pointers", is_doubled)
    assert found.tolist() == [[1.0 + is_doubled] * 16] * 16


@needs_triton
@pytest.mark.parametrize("kernel", ["device_function", "assembly", "tuned"])
def test_what_the_interpreter_cannot_do_is_not_here(own: Worlds, kernel: str):
    with pytest.raises(unittest.SkipTest, match=r"not here: run it on .* \(\w+\.py:\d+\)"):
        own.world(1).run(launch, kernel)


@needs_triton
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("product_of_unequal_dtypes", "same dtype"),
        ("product_of_unequal_shapes", "reduction dimensions"),
        ("odd_range", "power of 2"),
        ("unknown_name", "no_such_name"),
        ("unknown_function", "no_such_function"),
        ("asserting", "0 active drivers"),
    ],
)
def test_what_triton_refuses_in_a_kernel_is_a_failure(own: Worlds, kernel: str, said: str):
    with pytest.raises(RankRaised, match=said):
        own.world(1).run(launch, kernel)


@needs_triton
def test_tritons_language_without_a_kernel_is_a_failure(own: Worlds):
    with pytest.raises(RankRaised, match="Did you forget to add @triton"):
        own.world(1).run(on_the_host)


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


@pytest.mark.parametrize(
    ("file", "statement", "advice"),
    [
        (
            LANGUAGE,
            "raise RuntimeError('Block pointers have been removed in favor of the tensor ...')",
            "triton>=3.6,<3.8",
        ),
        (
            "mine.py",
            within_a_kernel("type('_aggregate_type', (), {})().element_ty"),
            "triton>=3.6,<3.8",
        ),
        (
            INTERPRETER,
            within_a_kernel(
                "raise TypeError('only 0-dimensional arrays can be converted to Python scalars')"
            ),
            "'numpy<2.4'",
        ),
        (
            INTERPRETER,
            "raise ValueError('numpy data itemsize (32 bits) exceeds dtype primitive_bitwidth')",
            "CUDA device",
        ),
        (
            "/site-packages/triton/runtime/build.py",
            "raise RuntimeError('Failed to find C compiler. Please specify via CC')",
            "install a C compiler",
        ),
    ],
)
def test_an_error_is_recognised_by_its_words_and_its_place(file, statement, advice):
    assert advice in str(not_here.translated(raised(file, statement)))
    # The same words, spoken by the implementation.
    if file != "mine.py":
        error = raised("mine.py", statement)
        assert not_here.translated(error) is error


# ------------------------------------------------------------------------------ imports that fail

LAZY = """
def ddp(module, *, process_group=None):
    {statement}
    return module
def flash_attention(q, k, v, **options):
    {statement}
"""


def judged(worlds: Worlds, path: Path, statement: str) -> runner.CaseResult:
    path.write_text(LAZY.format(statement=statement), encoding="utf-8")
    case = {"world": 2, "subject": "ddp", "toy": "mlp"}
    assert MEAN is not None
    return runner.run_case(MEAN, target.parse(str(path)), case, worlds)


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("import no_such_package.part", "python -m pip install no_such_package"),
        ("from cs336_basics.model import Linear", "course's package cs336_basics is not in the"),
        ("import pytest.no_such_part", "another version of pytest is needed"),
        ("from pytest import no_such_name", "another version of pytest is needed"),
        ("import importlib.metadata as m; m.version('no-such-package')", "pip install -e"),
        (
            "raise ImportError('libcudart.so: cannot open shared object file')",
            "does not fit this machine",
        ),
    ],
)
def test_what_is_not_installed_is_not_here(own: Worlds, tmp_path: Path, statement, advice):
    found = judged(own, tmp_path / "mine.py", statement)
    assert found.outcome is Outcome.NOT_HERE, found.message
    assert "\nnot here: " in found.message
    assert advice in found.message
    assert "(mine.py:3)" in found.message


@pytest.mark.parametrize(
    "statement",
    [
        "import mine_too.no_such_part",
        "from mine_too import no_such_name",
        "from typing import no_such_name",
        "import os.no_such_part",
        # Merely after it, and not because of it.
        "try: import no_such_package\n    except ImportError: raise ValueError(module)",
        "from . import part",
    ],
)
def test_what_the_implementation_lacks_of_itself_is_a_failure(own: Worlds, tmp_path, statement):
    (tmp_path / "mine_too").mkdir()
    (tmp_path / "mine_too" / "__init__.py").write_text("")
    found = judged(own, tmp_path / "mine.py", statement)
    assert found.outcome is Outcome.FAILED, found.message


@pytest.mark.parametrize(
    ("statement", "advice"),
    [
        ("from typing import override", "use Python 3.12 or newer"),
        ("import typing; typing.override", "use Python 3.12 or newer"),
        ("from warnings import deprecated", "use Python 3.13 or newer"),
        ("import annotationlib", "use Python 3.14 or newer"),
        ("import distutils.core", "use Python 3.11 or older"),
    ],
)
def test_a_name_of_another_python_is_not_here(statement: str, advice: str):
    try:
        exec(statement, {})
    except (ImportError, AttributeError) as error:
        found = not_here.translated(error)
    else:
        pytest.skip("this Python has it")
    assert advice in str(found)


def test_a_missing_package_is_not_taken_for_a_refusal(own: Worlds, tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(LAZY.format(statement="import no_such_package"), encoding="utf-8")
    clause = clause_of(test_refusals.test_inputs_that_do_not_fit_are_refused)
    assert clause is not None
    case = {"world": 1, "subject": "flash_attention", "case": "none"}
    found = runner.run_case(clause, target.parse(str(path)), case, own)
    assert found.outcome is Outcome.NOT_HERE, found.message


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    return subprocess.run(
        [sys.executable, "-m", "spec_tests", *arguments],
        cwd=Path(__file__).parents[2],
        env=kept,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"mine.py": "import torch\nimport no_such_package.part\n"}, "(mine.py:2)"),
        (
            {"mine.py": "from helper import x\n", "helper.py": "import no_such_package"},
            "helper.py:1",
        ),
        ({"mine.py": "import helper\n", "helper.py": "import torch, json.decoder"}, ""),
        ({"mine.py": "try:\n    import no_such_package\nexcept ImportError:\n    pass\n"}, ""),
        ({"mine.py": "import sys\nsys.path.append('lib')\nimport no_such_package\n"}, ""),
        ({"mine.py": "from . import x\nimport mine.deep\n"}, ""),
        ({"mine.py": "import = 3\n"}, ""),
        ({"mine.py": "\0"}, ""),
    ],
)
def test_a_module_that_is_surely_missing_is_found_without_a_rank(tmp_path: Path, files, said):
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = missing(str(tmp_path / "mine.py"))
    assert bool(found) == bool(said)
    assert said in found
    assert not said or "python -m pip install no_such_package" in found


def test_a_module_that_a_checkout_lacks_is_found_without_a_rank(tmp_path: Path):
    checkout = tmp_path / "mine"
    shutil.copytree(CS336, checkout)
    assert missing(f"cs336:{checkout}") == ""
    ddp = checkout / "cs336_systems" / "fsdp.py"
    ddp.write_text(f"import no_such_package\n{ddp.read_text(encoding='utf-8')}", encoding="utf-8")
    assert "(fsdp.py:1)" in missing(f"cs336:{checkout}")


def test_at_load_the_advice_takes_the_place_of_a_traceback(tmp_path: Path):
    (tmp_path / "mine.py").write_text("import no_such_package\n", encoding="utf-8")
    ended = command("--impl", str(tmp_path / "mine.py"))
    assert ended.returncode == 2
    assert "python -m pip install no_such_package" in ended.stderr
    assert "(mine.py:1)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_package_of_the_course_that_is_missing_is_one_message(tmp_path: Path):
    checkout = tmp_path / "mine"
    shutil.copytree(CS336, checkout, ignore=shutil.ignore_patterns("cs336-basics"))
    adapters = checkout / "tests" / "adapters.py"
    text = adapters.read_text(encoding="utf-8")
    importing = "from cs336_systems.fsdp import FSDP\n"
    lazily = text.replace(importing, "").replace(
        "    return FSDP", f"    {importing}    return FSDP"
    )
    adapters.write_text(lazily, encoding="utf-8")
    clauses = ("ddp.gradients.frozen-stay-none", "fsdp.backward.mean-gradient", "fsdp.forward.*")
    chosen = [word for each in clauses for word in ("--clause", each)]
    ended = command("--impl", f"cs336:{checkout}", "--level", "course", *chosen)
    said = "not here, 2 clauses: the course's package cs336_basics is not in the checkout"
    assert ended.stdout.count(said) == 1, ended.stdout
    assert ended.returncode == 0, ended.stdout
    assert "FAIL" not in ended.stdout
