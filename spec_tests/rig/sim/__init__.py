"""The simulated world: ranks as threads of one process, exactly one of them running at a time.

    world = worlds.world(4, target, transport="sim")
    world.run(body, 7)                                  # as on live ranks
    world.scheduled(Schedule("seeded", seed=3)).run(body, 7)    # another order of events

What a run on it can tell and live ranks cannot:

- The order of events is an input (`Schedule`): the same schedule gives the same run. Hypothesis
  draws it (`rig.strategies.schedules_of_ranks`) and shrinks it.
- A deadlock is proved at once, with a table of who waits where: `Deadlock`, a `RankHung` that
  hypothesis may shrink.
- Collectives are rendezvous. Whoever posts another operation, size, dtype, reduce operator or root
  than the first poster of the same group is told so (`CollectiveMismatch`, naming both ranks).
- Results appear when `wait()` returns and not before: until then outputs hold NaN, or the smallest
  integer. Writing to a buffer in flight is an error (`BufferInFlight`), and so is work that nobody
  has waited for when the body ends (`UnwaitedWork`; `Schedule.unwaited` says which work).

How. The whole world lives in one forked process per implementation and size, so that the parent
stays clean and a body that blocks or dies takes nothing along. torch's process groups are real;
their backend is a stand-in and the kernels of the `c10d` operators are replaced, so that DDP's
reducer, functional collectives and DTensor come through, and recorders see what they always see.
Groups say "gloo" when asked, so that an implementation goes the way that it goes there.

Blind spots: no real concurrency, no CUDA, no transport errors, no timeouts; module globals of an
implementation are shared by all ranks. Threads and processes that an implementation starts by
itself are not ranks: a collective issued there is refused (`NotSimulated`), and who blocks outside
of a collective is told by the parent's clock. A future (`get_future`, as the reducer of DDP takes
it) is complete when it is handed out: correct, but without overlap. MUST clauses are judged on
gloo as well, and what a clause finds here is replayed there (`rig.judge.replay`): the message says
if gloo shows it too. `needs()` says which hook a torch lacks; such a run is judged on gloo, with a
notice, and clauses that need a schedule are "not here".

Files: `schedule` (the input), `baton` (who runs, and what each rank has for itself), `meeting`
(rendezvous, work, buffers in flight), `collectives` (what a run has under way), `kernels` (each
operator's meaning and arithmetic), `hooks` (into torch), `store`, `host` (the process), `pool` (its
parent's side), `faults` (the errors).
"""

from spec_tests.rig.sim.faults import Deadlock
from spec_tests.rig.sim.schedule import Schedule

__all__ = ["Deadlock", "Schedule"]
