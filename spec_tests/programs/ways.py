"""The ways to divide training: how a toy is wrapped, and where its gradients and weights are."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from spec_tests.programs.alone import SEED, shape_of
from spec_tests.programs.calls import Program, parsed
from spec_tests.programs.machine import Watching
from spec_tests.programs.on_ranks import OnRank
from spec_tests.programs.pieces import exact
from spec_tests.programs.scene import SMALL_BUCKET_MB, Scene
from spec_tests.programs.units import having, lists_of, parameters_of_units
from spec_tests.rig.judge.oracle import Gradients, Named
from spec_tests.rig.ranks.rank import Context
from spec_tests.rig.target import NotOfferedError

NUMBERED = ("freeze", "thaw", "step_one")
"""Calls that concern a parameter by its number."""


def replicated(
    ctx: Context,
    subject: str,
    module: nn.Module,
    *,
    bucket_size_mb: float = SMALL_BUCKET_MB,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Wrap a module with `ddp` or `ddp_bucketed`."""
    # Left out where it is the default: whoever knows no groups fails in the clauses on groups only.
    options: dict[str, Any] = {} if process_group is None else {"process_group": process_group}
    if subject == "ddp_bucketed":
        options["bucket_size_mb"] = bucket_size_mb
    return getattr(ctx.impl, subject)(module, **options)


class Replicas(OnRank):
    """`ddp` and `ddp_bucketed`: gradients are read from the Parameters of before wrapping.

    Args:
        bucket_size_mb: in place of the scene's.
    """

    def __init__(
        self,
        ctx: Context,
        subject: str,
        scene: Scene | str,
        bucket_size_mb: float = 0.0,
        **compiling: Any,
    ) -> None:
        self.bucket_size_mb = bucket_size_mb or Scene.of(scene)["bucket"]
        super().__init__(ctx, subject, scene, **compiling)

    def _built(self) -> nn.Module:
        seed = SEED + self.ctx.rank * self.scene["seeds"]
        return self.toy.build(seed).to(self.ctx.device, self.scene.weights)

    def wrap(self) -> Any:
        self.plain = list(self.module.parameters())
        options: Any = {"bucket_size_mb": self.bucket_size_mb, "process_group": self.group}
        return replicated(self.ctx, self.subject, self.module, **options)

    def directly(self, micro: str) -> Gradients:
        called, self.called = self.called, self.module
        self.zero_grad("none")
        self.loss(micro).backward()
        found = self.gradients()
        self.zero_grad("none")
        self.called = called
        return found

    def parameters(self) -> list[Any]:
        return self.plain


class Whole(OnRank):
    """`fsdp`: how parameters are represented is open, so gradients are read from an update.

    Attributes:
        packs: a parameter carries several of the plain model's, so that it has no number.
    """

    packs = False

    def wrap(self) -> Any:
        return self.ctx.impl.fsdp(self.module)

    def parameters(self) -> list[Any]:
        found = super().parameters()
        if not isinstance(self.wrapped, nn.Module):  # courses' wrappers are none
            return found
        own = {n.removeprefix("module."): p for n, p in self.wrapped.named_parameters()}
        if own.keys() >= {*self.names}:
            return found
        counts: list[Any] = [None] * self.ctx.world_size
        dist.all_gather_object(counts, len(found))
        self.packs = len({*counts}) > 1
        if self.packs:
            return found
        carried = [self._carried_by(parameter) for parameter in found]
        self.packs = any(len(numbers) > 1 for numbers in carried)
        order = sorted(range(len(found)), key=lambda n: min(carried[n], default=len(self.names)))
        return [found[n] for n in order]

    @torch.no_grad()
    def _carried_by(self, parameter: Any) -> list[int]:
        """Return the numbers of the plain parameters that turn with this one."""
        before = self.full()
        parameter.neg_()
        after = self.full()
        parameter.neg_()
        names = enumerate(self.names)
        return [n for n, name in names if name in after and (after[name] != before[name]).any()]

    def follow(self, program: Program | str, watching: Watching = contextlib.nullcontext) -> Any:
        numbered = [c for c in parsed(program) if c[0] in NUMBERED or c[1:] == ("one-parameter",)]
        if self.packs and (numbered or self.optimizers[1:]):
            raise NotOfferedError("not offered: a parameter for each of the plain model's")
        return super().follow(program, watching)

    def full(self) -> Named:
        found = self.ctx.impl.full_parameters(self.wrapped)
        plain = {name.removeprefix("module."): value for name, value in found.items()}
        return {n: exact(plain[n]) for n in self.names if n in plain}

    def gradients(self) -> Gradients:
        """Return what a step of SGD with a rate of one subtracts; the weights are put back."""
        before, kept = self.full(), [p.detach().clone() for p in self.held]
        torch.optim.SGD(self.held, lr=1.0, foreach=False).step()
        after = self.full()
        with torch.no_grad():
            for parameter, value in zip(self.held, kept, strict=True):
                parameter.copy_(value)
        return {name: before[name] - after[name] for name in before}


class Shards(OnRank):
    """`fully_shard`, unit by unit and then the whole."""

    handles: Sequence[Any] = ()

    def _built(self) -> nn.Module:
        if self.scene.word("built") == "here":
            return super()._built()
        with torch.device("meta"):
            return self.toy.model().to(self.scene.weights)

    def wrap(self) -> Any:
        impl, scene, options = self.ctx.impl, self.scene, self._options()
        units = lists_of(self.module, scene.word("units"))
        for parts in units:
            impl.fully_shard(parts if parts[1:] else parts[0], **options)
        impl.fully_shard(self.module, **options)
        if scene.word("hints") == "hinted":
            self._hint([parts[0] for parts in reversed(units)])
        if scene.word("entrance") == "method":
            self.module.compute = self.module.forward  # type: ignore[assignment]  # a function
            impl.register_fsdp_forward_method(self.module, "compute")
        if scene.word("built") == "on-meta":
            self._fill()
        if scene["divisor"]:
            self._divide()
        return self.module

    def _options(self) -> dict[str, Any]:
        """Return what the scene gives `fully_shard` beside a module."""
        scene = self.scene
        options: dict[str, Any] = {}
        if scene["reshard"] is not None:
            options["reshard_after_forward"] = scene["reshard"]
        if scene["mesh"]:
            options["mesh"] = self.ctx.mesh(
                shape_of(scene, self.ctx.world_size), ("replicate", "shard")
            )
        if scene.word("group") == "rows":
            options["mesh"] = self.ctx.mesh((2, 2), ("replicate", "shard"))["shard"]
        elif self.group is not None:
            from torch.distributed.device_mesh import DeviceMesh

            options["mesh"] = DeviceMesh.from_group(self.group, self.ctx.device.type)
        if scene["ignored"]:
            every = list(self.module.parameters())
            options["ignored_params"] = {every[number] for number in scene["ignored"]}
        if scene["precision"]:
            options["mp_policy"] = self.ctx.impl.MixedPrecisionPolicy(**scene["precision"])
        return options

    def _divide(self) -> None:
        for part in having(self.module, "set_gradient_divide_factor"):
            part.set_gradient_divide_factor(self.scene["divisor"])
            # In float32 FSDP2 leaves the factor to the backend, and gloo knows none.
            if hasattr(part, "set_force_sum_reduction_for_comms"):
                part.set_force_sum_reduction_for_comms(True)

    def _hint(self, parts: Sequence[Any]) -> None:
        """Name the next unit, unless the setters refuse that: no later call may."""
        for one, following in itertools.pairwise(parts):
            with contextlib.suppress(Exception):
                one.set_modules_to_forward_prefetch([following])
                following.set_modules_to_backward_prefetch([one])

    @torch.no_grad()
    def _fill(self) -> None:
        from torch.distributed.tensor import distribute_tensor  # half a second, for ranks alone

        self.module.to_empty(device=self.ctx.device)
        values = dict(super()._built().named_parameters())
        for name, p in self.module.named_parameters():
            shard: Any = p
            shard.copy_(distribute_tensor(values[name], shard.device_mesh, shard.placements))

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        self.wrapped.set_requires_gradient_sync(False)
        yield
        self.wrapped.set_requires_gradient_sync(True)

    def finish_backward(self) -> None:
        """Do nothing: a backward ends by itself."""

    def partly(self, micro: str) -> Gradients | None:
        self.wrapped.set_requires_all_reduce(False)
        self.loss(micro).backward()
        found = None if self.scene["mesh"] else self.gradients()
        if int(micro) % 2:
            self.wrapped.set_requires_all_reduce(True)
        else:
            self.wrapped.set_requires_gradient_sync(True)  # which turns on both
        return found

    def outermost_waits(self, micro: str) -> Gradients | None:
        self.wrapped.set_requires_gradient_sync(False, recurse=False)
        self.loss(micro).backward()
        self.wrapped.set_requires_gradient_sync(True, recurse=False)
        found, names = self.gradients(), parameters_of_units(self.module, self.scene.word("units"))
        return {name: found[name] for name in names} or None

    def early(self, micro: str) -> None:
        self.wrapped.set_is_last_backward(False)
        self.loss(micro).backward()
        self.wrapped.set_is_last_backward(True)

    def keep(self, flag: str) -> None:
        self.wrapped.set_reshard_after_backward(flag == "False")

    def reloads(self) -> None:
        self.module.load_state_dict(self.module.state_dict())

    def unshard(self, at_once: str) -> Named | None:
        options = {} if at_once == "now" else {"async_op": True}
        self.handles = [part.unshard(**options) for part in having(self.module, "unshard")]
        return self._shown() if at_once == "now" else None

    def _shown(self) -> Named:
        # One that is still a DTensor shows its own rows alone: full parameters are plain tensors.
        shown = ((n, getattr(p, "to_local", p.detach)()) for n, p in self.module.named_parameters())
        return {name: exact(value) for name, value in shown}

    def wait(self) -> Named | None:
        for handle in self.handles:
            if handle is not None:
                handle.wait()
        self.handles = []
        return self._shown() if self.before == ("unshard", "in-flight") else None

    def reshard(self) -> None:
        for part in having(self.module, "reshard"):
            part.reshard()

    def rest(self) -> None:
        super().rest()
        if hasattr(self.wrapped, "set_reshard_after_backward"):
            self.keep("False")
        if hasattr(self.wrapped, "reshard"):
            with contextlib.suppress(NotImplementedError):  # not offered by hand
                self.reshard()


WAYS: dict[str, type[OnRank]] = {
    "ddp": Replicas,
    "ddp_bucketed": Replicas,
    "fsdp": Whole,
    "fully_shard": Shards,
}
