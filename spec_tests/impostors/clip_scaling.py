"""Near-misses of the scaling: by another factor, or alone where a norm is no number."""

from __future__ import annotations

import math

import torch
from torch.distributed.tensor import DTensor

from spec_tests.impostors.plain_clip import PlainClip, card


class ScalesByOwnNorm(PlainClip):
    def factor(self, norm: torch.Tensor) -> torch.Tensor:
        return super().factor(self.root(self.part(self.gradients)))


class ClipsEachByItself(PlainClip):
    @torch.no_grad()
    def scale(self, norm: torch.Tensor) -> None:
        for gradient in self.gradients:
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            own = torch.linalg.vector_norm(whole.double(), self.order)
            self.local(gradient).mul_(self.factor(own))


class Normalises(PlainClip):
    def factor(self, norm: torch.Tensor) -> torch.Tensor:
        return self.max_norm / (norm + 1e-6)


class SkipsNan(PlainClip):
    """A comparison with NaN is false, so the largest is looked for among the rest."""

    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return super().combined([part.nan_to_num(nan=0.0, posinf=math.inf) for part in parts])


class SkipsNanInMaxima(SkipsNan):
    def combined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        if self.order == math.inf:
            return super().combined(parts)
        return PlainClip.combined(self, parts)


class RaisesAlone(PlainClip):
    def norm(self) -> torch.Tensor:
        if self.strict and not math.isfinite(self.part(self.gradients)):
            raise RuntimeError("the gradient norm is not finite")
        return super().norm()


class NeverRaises(PlainClip):
    def check(self, norm: torch.Tensor) -> None:
        pass


class ScalesThenRaises(PlainClip):
    def check(self, norm: torch.Tensor) -> None:
        if self.strict:
            self.scale(norm)
        super().check(norm)


class RaisesWhenAsked(PlainClip):
    """Takes the flag for a reason."""

    def check(self, norm: torch.Tensor) -> None:
        if self.strict:
            raise RuntimeError(f"the gradient norm is {norm.item()}")


IMPOSTORS = (
    card(
        ScalesByOwnNorm,
        "scales-by-own-norm",
        "Returns the global norm and scales by the rank's own.",
        "miles_diffusion issue 35: a local partial value is used as if it were global.",
        "The norm in the log is right.",
        "clip.scaling.factor",
    ),
    card(
        ClipsEachByItself,
        "clips-each-by-itself",
        "Clips every gradient to max_norm by itself.",
        "A loop over parameters around clip_grad_norm_.",
        "Every single norm is as asked.",
        "clip.scaling.factor",
    ),
    card(
        Normalises,
        "normalises",
        "Scales small gradients up to max_norm.",
        "The clamp at one is forgotten.",
        "Early in training norms are large.",
        "clip.scaling.untouched-below",
    ),
    card(
        SkipsNan,
        "skips-nan",
        "Leaves NaN out of the norm.",
        "nan_to_num, to keep the log readable.",
        "Norms are finite.",
        "clip.nonfinite.agreed",
        "clip.nonfinite.error-on-all-ranks",
    ),
    card(
        SkipsNanInMaxima,
        "skips-nan-in-maxima",
        "Combines the largest elements by comparison.",
        "An all-reduce with MAX: PyTorch's own, for DTensors.",
        "The 2-norm is right.",
        "clip.nonfinite.largest-of-nan",
    ),
    card(
        RaisesAlone,
        "raises-alone",
        "Looks at its own part before it talks to others.",
        "Megatron-LM issue 5529.",
        "On one rank it is the same.",
        "clip.nonfinite.error-on-all-ranks",
        outcomes=("failed", "hang", "died"),
    ),
    card(
        NeverRaises,
        "never-raises",
        "Ignores error_if_nonfinite.",
        "The argument is accepted for compatibility.",
        "Norms are finite.",
        "clip.nonfinite.error-on-all-ranks",
    ),
    card(
        ScalesThenRaises,
        "scales-then-raises",
        "Scales by NaN, then raises.",
        "The check stands at the end.",
        "It raises.",
        "clip.nonfinite.error-scales-nothing",
    ),
    card(
        RaisesWhenAsked,
        "raises-when-asked",
        "Raises whenever error_if_nonfinite is set.",
        "The condition has lost its `not`, or its second half.",
        "Tests of the flag use NaN.",
        "clip.nonfinite.finite-is-no-error",
    ),
)
