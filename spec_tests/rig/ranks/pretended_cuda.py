"""A stand-in for CUDA: code that insists on a GPU runs in a rank on the CPU.

Most students write for a GPU: they assert `q.is_cuda`, allocate with `device="cuda"`, push NVTX
ranges and time with events. Where there is no GPU, `install` makes such code run, so that values,
traffic and memory (counted by the suite's own recorder) can be judged on a laptop. Tensors stay on
the CPU throughout. For the whole process, and so for every thread of it:

    devices      a CUDA device that is passed to torch means the CPU
    tensors      `is_cuda`, `device` and `get_device()` answer as on a GPU; `cpu()` copies, as there
    torch.cuda   streams, events, NVTX, memory statistics and the like exist and do nothing
    "nccl"       means gloo, which takes what NCCL does (`gloo_forms`)
    compilers    torch.compile and torch.jit.script return what they are given; `triton.autotune`
                 measures none and takes the first configuration that static assertions allow

torch and Triton ask the same questions (`tensor.is_cuda`, `torch.cuda.is_available()`) and would
act on the answers, and the suite wants to know as well. So an answer depends on who asks: these
packages get the truth, everybody else the pretence. By replaced attributes and not by a
TorchFunctionMode, which is off within `Tensor.backward`, and so in every hook and every backward
of an autograd function.

Not stood in for: CUDA graphs, C++ extensions, `torch.compile` as something that a clause judges.
Not seen: whether a tensor was moved to the GPU at all, races between streams, device memory, time.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _device

from spec_tests.rig.ranks import cuda_runtime, gloo_forms, not_here
from spec_tests.rig.ranks.cuda_runtime import device_index, nothing

_TOLD_THE_TRUTH = ("torch", "triton", "spec_tests")
_CPU = torch.device("cpu")


class NeedsCUDA(BaseException):
    """Something cannot be stood in for; the clause is "not here", whatever its body catches."""


def _is_foreign(depth: int = 2) -> bool:
    """Whether the caller's caller is neither torch nor Triton nor the suite."""
    name = str(sys._getframe(depth).f_globals.get("__name__", ""))
    return name.partition(".")[0] not in _TOLD_THE_TRUTH


def _here(value: Any) -> Any:
    """The CPU for a CUDA device, whatever else as it is."""
    if isinstance(value, torch.device):
        return _CPU if value.type == "cuda" else value
    if isinstance(value, str) and (value == "cuda" or value.startswith("cuda:")):
        return "cpu"
    return value


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which means the CPU where it is given a CUDA device."""

    @functools.wraps(function)
    def placed(*args: Any, **kwargs: Any) -> Any:
        if type(kwargs.get("device")) is int:  # a number alone is an accelerator's
            kwargs["device"] = _CPU
        kwargs.pop("pin_memory", None)  # of use to a GPU only, and refused without one
        named = {name: _here(value) for name, value in kwargs.items()}
        return function(*map(_here, args), **named)

    return placed


def _by_caller(pretended: Callable[..., Any], true: Callable[..., Any]) -> Callable[..., Any]:
    """The pretence for foreign code, the truth for the others."""

    @functools.wraps(true)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return (pretended if _is_foreign() else true)(*args, **kwargs)

    return answer


def _stand_in_for_torch_cuda() -> None:
    cuda = torch.cuda
    for home in (cuda, cuda.memory, cuda.random, cuda.streams, torch.accelerator):
        own = vars(home)
        for name in cuda_runtime.FOR_EVERYBODY.keys() & own.keys():
            setattr(home, name, cuda_runtime.FOR_EVERYBODY[name])
        for name in cuda_runtime.FOR_FOREIGN_CODE.keys() & own.keys():
            setattr(home, name, _by_caller(cuda_runtime.FOR_FOREIGN_CODE[name], own[name]))
    setattr(cuda.nvtx, "_nvtx", cuda_runtime.NVTX)  # noqa: B010 - what its functions call
    torch.Stream = cuda_runtime.Stream  # type: ignore[misc,assignment]  # in this process
    torch.Event = cuda_runtime.Event  # type: ignore[misc,assignment]  # likewise


# ---------------------------------------------------------------------------------------- tensors


_TRUE = {name: vars(torch._C.TensorBase)[name] for name in ("device", "is_cuda", "is_cpu")}
_TO, _CPU_COPY, _GET_DEVICE = torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.get_device
_PLACED, _TYPE = _on_cpu(_TO), torch.Tensor.type


def _pretends(tensor: Any) -> bool:
    """Whether this tensor is on a GPU for whoever asked the caller; meta tensors are for nobody."""
    return _is_foreign(3) and bool(_TRUE["is_cpu"].__get__(tensor))


class _Tensor:
    """What torch.Tensor says and does for foreign code."""

    @property
    def device(self: Any) -> torch.device:
        if _pretends(self):
            return torch.device("cuda", device_index())
        return _TRUE["device"].__get__(self)

    @property
    def is_cuda(self: Any) -> bool:
        return _pretends(self) or _TRUE["is_cuda"].__get__(self)

    @property
    def is_cpu(self: Any) -> bool:
        return not _pretends(self) and _TRUE["is_cpu"].__get__(self)

    def get_device(self: Any) -> int:
        return device_index() if _pretends(self) else _GET_DEVICE(self)

    def type(self: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            said = _TYPE(self)
            return said.replace("torch.", "torch.cuda.") if _pretends(self) else said
        true = dtype.replace(".cuda", "") if isinstance(dtype, str) else dtype
        return _TYPE(self, getattr(true, "_true", true), *args, **kwargs)

    def to(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        wanted = kwargs.get("device", args[0] if args else None)
        if args and type(wanted) is int:  # the number of a device
            args = (_CPU, *args[1:])
        leaves = isinstance(wanted, str | torch.device) and torch.device(wanted).type == "cpu"
        if leaves and len(args) < 4 and _is_foreign():
            kwargs["copy"] = True  # from a GPU it would be one
        return _PLACED(self, *args, **kwargs)

    def cpu(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return _TO(self, _CPU, copy=True) if _is_foreign() else _CPU_COPY(self, *args, **kwargs)

    def cuda(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self  # type: ignore[no-any-return]  # a tensor

    pin_memory = cuda
    record_stream = nothing


def _stand_in_for_tensors() -> None:
    methods = {name: method for name, method in vars(_Tensor).items() if name[0] != "_"}
    for name in dir(torch.Tensor):
        if name.startswith("new_"):
            methods[name] = _on_cpu(getattr(torch.Tensor, name))
    for name, method in methods.items():
        setattr(torch.Tensor, name, method)


def _stand_in_for_devices() -> None:
    made = {function.__name__ for function in _device._device_constructors()}
    made |= {name for name in dir(torch) if name.endswith("_like")}
    made |= {"load", "normal", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype"}
    for name in made & set(dir(torch)):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    for holder, name in (
        (_device.DeviceContext, "__init__"),  # torch.set_default_device, `with torch.device(...)`
        (torch.amp, "custom_fwd"),
        (torch.amp, "custom_bwd"),
        (device_mesh, "init_device_mesh"),
        (dist, "init_device_mesh"),
        (device_mesh.DeviceMesh, "__init__"),
    ):
        setattr(holder, name, _on_cpu(getattr(holder, name)))
    _stand_in_for_autocast()
    torch.Generator = _Kind("Generator", (), {"_true": torch.Generator})  # type: ignore[misc,assignment]  # here
    for name in dir(torch.cuda):
        if name.endswith("Tensor"):  # torch.cuda.FloatTensor([1.0])
            setattr(torch.cuda, name, _Kind(name, (), {"_true": getattr(torch, name)}))

    to = nn.Module.to

    def module_to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        placed = tuple(_CPU if type(value) is int else value for value in args)
        return _on_cpu(to)(self, *placed, **kwargs)

    nn.Module.to = module_to  # type: ignore[assignment,method-assign]  # in this process

    handle = device_mesh._get_device_handle

    def device_handle(device_type: str = "cuda") -> Any:
        return torch.cuda if _is_foreign() else handle(device_type)

    device_mesh._get_device_handle = device_handle
    kind = vars(device_mesh.DeviceMesh).get("device_type")
    if isinstance(kind, property):
        device_mesh.DeviceMesh.device_type = property(  # type: ignore[method-assign,assignment]  # here
            lambda self: _pretended_type(kind.__get__(self), _is_foreign())
        )


def _pretended_type(device_type: str, is_foreign: bool) -> str:
    return "cuda" if is_foreign and device_type == "cpu" else device_type


class _Kind(type):
    """A class of C that makes a GPU's objects, for which the CPU's stands."""

    _true: Any

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls._true(*map(_here, args), **{name: _here(v) for name, v in kwargs.items()})

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls._true)


def _stand_in_for_autocast() -> None:
    begin, is_enabled = torch.autocast.__init__, torch.is_autocast_enabled

    def autocast(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == "cuda" and dtype is None:
            dtype = torch.float16  # the default on a GPU; on a CPU it is bfloat16
        begin(self, _here(device_type), dtype, *args, **kwargs)

    torch.autocast.__init__ = autocast  # type: ignore[method-assign]  # in this process
    # Without an argument it asks for a GPU's.
    torch.is_autocast_enabled = lambda device_type="cuda": is_enabled(_here(device_type))
    torch.get_autocast_gpu_dtype = lambda: torch.get_autocast_dtype("cpu")


# --------------------------------------------------------------------------- groups and compilers


def _stand_in_for_nccl() -> None:
    def on_gloo(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            for name in ("device_id", "device_ids", "output_device"):
                kwargs.pop(name, None)  # gloo and a module on the CPU take none
            if "nccl" in str(kwargs.get("backend")):
                kwargs["backend"] = "gloo"
            return function(*("gloo" if arg == "nccl" else arg for arg in args), **kwargs)

        return called

    for name in ("init_process_group", "new_group", "barrier"):
        for home in (dist, dist.distributed_c10d):
            setattr(home, name, on_gloo(getattr(home, name)))
    dist.is_nccl_available = _by_caller(lambda: True, dist.is_nccl_available)
    wrap = on_gloo(DistributedDataParallel.__init__)
    DistributedDataParallel.__init__ = wrap  # type: ignore[method-assign]  # in this process


def _stand_in_for_compilers() -> None:
    def compile(model: Any = None, **kwargs: Any) -> Any:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("spec_tests."):
            raise NeedsCUDA("torch.compile is not judged where CUDA is stood in for")
        if model is None:
            return compile
        function: Any = type(model).forward if isinstance(model, nn.Module) else model
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is not None:
            not_here.UNCOMPILED.add(code)
        return model

    torch.compile = compile
    torch.jit.script = lambda obj, *args, **kwargs: obj
    if "triton.runtime.autotuner" in sys.modules:
        _take_the_first(sys.modules["triton.runtime.autotuner"])
    else:
        sys.meta_path.insert(0, _Autotuner())


def _take_the_first(autotuner: ModuleType) -> None:
    """Pass over a configuration only where a device does: its kernel has a false static_assert."""
    tuner: Any = autotuner.Autotuner
    run = tuner.run

    def run_the_first(self: Any, *args: Any, **options: Any) -> Any:
        self.refused = []
        while True:
            try:
                return run(self, *args, **options)
            except Exception as error:
                if not _is_static(error) or self.best_config in self.refused:
                    raise
                self.refused.append(self.best_config)
                self.cache.clear()

    tuner.run = run_the_first
    tuner._bench = lambda self, *args, config, **meta: [float(config in self.refused)] * 3


def _is_static(error: BaseException) -> bool:
    """Whether a kernel's `tl.static_assert` is what Triton's interpreter raised."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_asserted = bool(frames) and "static_assert" in frames[-1].f_code.co_name
    return isinstance(error, AssertionError) and is_asserted


class _Autotuner(MetaPathFinder):
    """Changes Triton's autotuner once it is imported, which may be never."""

    def find_spec(self, name: str, *ignored: object) -> Any:
        """The module's own spec, with that to do at the end."""
        if name != "triton.runtime.autotuner":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def executed(module: ModuleType) -> None:
                execute(module)
                _take_the_first(module)

            spec.loader.exec_module = executed  # type: ignore[method-assign]  # of this loader
        return spec


def install() -> None:
    """Stand in for CUDA in this process, before foreign code is imported; once and for good."""
    _stand_in_for_torch_cuda()
    _stand_in_for_tensors()
    _stand_in_for_devices()
    _stand_in_for_nccl()
    gloo_forms.install()
    _stand_in_for_compilers()
