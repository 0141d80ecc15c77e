"""What the zygote of the impostors' command imports besides torch: the suite and the reference.

Hundreds of worlds start from it, one after another, each for one near-miss. Importing these anew
was four fifths of a rank's start. A fork shares nothing with the next one, so each near-miss still
has ranks that no other has touched; one that patches the reference has it forgotten first.
"""

import contextlib

from spec_tests import museum
from spec_tests.impls import parse
from spec_tests.rig import ledger
from spec_tests.rig.target import import_target

__all__ = ["museum"]

ledger.load_all()
with contextlib.suppress(Exception):  # a rank will meet it again, and say so
    import_target(parse("solution"))
