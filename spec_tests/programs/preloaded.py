"""Imported by the zygote after the packages of others: the rig that every rank needs.

Then all that is loaded is frozen: a collection in a fork of the zygote would otherwise look at, and
so copy, a million objects of torch. What cannot be imported here a rank meets again, and says so.
"""

import contextlib
import gc
import importlib

for _name in ("rig.ranks.rank", "rig.sim.host", "programs.law"):
    with contextlib.suppress(Exception):
        importlib.import_module(f"spec_tests.{_name}")
gc.collect()
gc.freeze()
