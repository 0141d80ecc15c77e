"""What the zygote imports last: the rig that every rank needs, and no clause or implementation.

Then all that is loaded is frozen: a collection in a fork of the zygote would otherwise look at, and
so copy, a million objects of torch.
"""

import gc

from spec_tests.programs import law
from spec_tests.rig.ranks import rank
from spec_tests.rig.sim import host

__all__ = ["host", "law", "rank"]

gc.collect()
gc.freeze()
