"""One rank's view of a replicated toy, where a clause needs more than a situation says."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed import ProcessGroup

from spec_tests.programs.alone import SEED as SEED  # the chapter takes it from here
from spec_tests.programs.scene import Scene
from spec_tests.programs.ways import Replicas
from spec_tests.rig.ranks.rank import Context

DDP = ("ddp", "ddp_bucketed")
# Small enough that every toy needs several buckets: 32 float32 elements.
SMALL_BUCKET_MB = 32 * 4 / 2**20


def wrap(
    ctx: Context,
    subject: str,
    module: nn.Module,
    *,
    bucket_size_mb: float = SMALL_BUCKET_MB,
    process_group: ProcessGroup | None = None,
) -> nn.Module:
    """Wrap `module` with the function under test; the bucketed one gets small buckets."""
    # Left out where it is the default: whoever knows no groups fails in the clauses on groups only.
    group = {} if process_group is None else {"process_group": process_group}
    if subject == "ddp_bucketed":
        return ctx.impl.ddp_bucketed(module, bucket_size_mb=bucket_size_mb, **group)
    return ctx.impl.ddp(module, **group)


class Replica(Replicas):
    """Replicas of a scene, of which a clause needs more than a situation says.

    Args:
        options: of `wrap`.
    """

    def __init__(self, ctx: Context, subject: str, scene: str, **options: Any) -> None:
        self.options = options
        super().__init__(ctx, subject, Scene.of(scene))

    def wrap(self) -> Any:
        """Wrap the toy, in buckets of the size that was asked for."""
        self.plain = list(self.module.parameters())
        return wrap(self.ctx, self.subject, self.module, **self.options)
