"""Start-up hook of `trainspec watch`: Python imports it first in each process of the command.

It runs the `sitecustomize` that this one hides, then waits: only when the process has imported
torch is the watcher loaded, from its files and under a name of its own, so that no folder of this
project is added to the script's `sys.path`.
"""

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  # pathlib costs 5 ms here
_NAME = "trainspec_watch"


class _AfterTorch:
    """A finder that loads the watcher as soon as torch is executed.

    Libraries ask `find_spec("torch")` to learn whether it is installed, long before they import it.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return torch's own spec, with the watcher's start behind its execution."""
        if name != "torch":
            return None
        finders = [each for each in sys.meta_path if each is not self]
        found = (each.find_spec(name, path, target) for each in finders)  # type: ignore[arg-type]
        spec = next((each for each in found if each is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_start(module):  # type: ignore[no-untyped-def]
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)  # type: ignore[arg-type]
                _start()

        spec.loader.exec_module = execute_and_start  # type: ignore[method-assign]
        return spec


def _start() -> None:
    try:
        folder = os.path.dirname(_HERE)  # noqa: PTH120
        file = os.path.join(folder, "__init__.py")  # noqa: PTH118
        spec = importlib.util.spec_from_file_location(
            _NAME, file, submodule_search_locations=[folder]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
        importlib.import_module(f"{_NAME}.probe").start()
    except Exception as error:  # the script goes on: a watcher may miss it, but never break it
        print(f"trainspec watch: cannot watch process {os.getpid()}: {error!r}", file=sys.stderr)


def _run_hidden() -> None:
    rest = [each for each in sys.path if os.path.abspath(each or ".") != _HERE]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("TRAINSPEC_WATCH"):
    sys.meta_path.insert(0, _AfterTorch())  # type: ignore[arg-type]
_run_hidden()
