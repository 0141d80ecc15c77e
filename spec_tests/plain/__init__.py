"""Plain implementations: the shortest right code for each function of the contract.

Read these to understand an algorithm; `solution` shows it fast. One file per algorithm, written
apart from `solution`:

    ddp            gradients averaged in buckets          train        the loop around it
    zero1          optimizer state divided                checkpoint   save and resume
    fsdp           parameters divided                     loader       batches for each rank
    fully_shard    FSDP2's surface over `fsdp`            clip         norm of sharded gradients
    attention      softmax(q k^T) v in tiles              decoder      a language model
    memory         the peak of a step                     throughput   rates and a sweep
    trace          what a profiler's trace says     trainer      all of it behind `step`

    python -m spec_tests --impl plain

judges them: they conform at level `correct`. Most near-misses in `spec_tests/museum` change a line
or a few of these, the others override a method. `BASES` holds the classes that offer functions.
"""

from spec_tests.plain.attention import PlainAttention
from spec_tests.plain.checkpoint import PlainCheckpoint
from spec_tests.plain.clip import PlainClip
from spec_tests.plain.ddp import PlainDdp
from spec_tests.plain.decoder import PlainDecoder
from spec_tests.plain.fully_shard import PlainFsdp
from spec_tests.plain.loader import PlainLoader
from spec_tests.plain.memory import PlainMemory
from spec_tests.plain.throughput import PlainThroughput
from spec_tests.plain.trace import PlainTrace
from spec_tests.plain.train import PlainTrain
from spec_tests.plain.trainer import PlainTrainer
from spec_tests.plain.zero1 import PlainZero1

# PlainDdp after PlainFsdp: its finish_gradient_synchronization ends either's backward.
BASES = (
    PlainAttention,
    PlainCheckpoint,
    PlainClip,
    PlainDecoder,
    PlainFsdp,
    PlainDdp,
    PlainLoader,
    PlainMemory,
    PlainThroughput,
    PlainTrace,
    PlainTrain,
    PlainTrainer,
    PlainZero1,
)
for _base in BASES:
    globals().update(_base.functions())
