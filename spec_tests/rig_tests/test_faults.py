"""The command that breaks ranks a hundred times, and the times that the rig promises."""

import os

from spec_tests.rig import liveness, pool, world
from spec_tests.rig.world import Worlds
from spec_tests.rig_tests import faults


def test_the_rigs_own_times_add_up_to_the_promise():
    # Released peers, one poll, the stacks of four ranks: before the limit for a raise.
    longest_raise_s = pool.RELEASE_S + pool._POLL_S + 4 * 0.3
    assert longest_raise_s < faults.LIMITS_S["raise"]
    longest_hang_s = world.GRACE_S + 2 * pool._POLL_S + 4 * 0.3
    assert longest_hang_s < faults.LIMITS_S["hang"] < world.TIMEOUT_S


def test_the_calling_process_is_not_blocked_and_nobody_watches_the_dead():
    watched = liveness.Liveness(os.getpid(), window_s=0.0)
    assert not watched.is_blocked()
    assert not liveness.Liveness(2**22 + 1, window_s=0.0).is_blocked()


def test_the_fault_command_plans_every_kind_rank_and_size():
    planned = faults.plan(45, seed=3)
    assert len(set(planned)) == 45 == len(planned)
    assert planned == faults.plan(45, seed=3) != faults.plan(45, seed=4)


def test_the_fault_command_complains_about_what_is_late_or_wrong():
    fault = faults.Fault("hang", 2, 0)
    late, wrong = faults.Finding(fault, 5.5, ""), faults.Finding(fault, 1.0, "blames rank 1")
    found = faults.complaints([late, wrong, faults.Finding(fault, 4.0, "")])
    assert len(found) == 2
    assert "reported after 5.50 s, expected 5.0 s" in found[1]
    assert "| hang | 3 | 4.00 | 5.50 | 5 | 1 |" in faults.table(
        [late, wrong, faults.Finding(fault, 4.0, "")]
    )


def test_a_fault_of_each_quick_kind_is_reported_rightly(worlds: Worlds):
    found = [
        faults.inject(faults.Fault(kind, 2, culprit), worlds)
        for kind in ("raise", "exit", "sigkill")
        for culprit in range(2)
    ]
    assert [finding.complaint for finding in found] == [""] * 6
