"""Checkpoints: one new folder per save, complete or not there, for any number of ranks.

    directory/
    ├── step-00000010/          complete: `complete.json` is inside, written last
    │   ├── __0_0.distcp ...    tensors, each once, divided over the ranks that wrote them
    │   ├── .metadata           which tensor lies where; both are torch.distributed.checkpoint's
    │   ├── state.pt            everything that is no tensor of the model or the optimizer
    │   └── complete.json       step, ranks, and size of every file
    ├── step-00000020/
    └── .step-00000030.tmp/     a save under way, or one that was killed: swept by the next one

Save, on all ranks (`save.py`):
1. capture   parameters, buffers and optimizer state by canonical name; loader, RNG per rank
2. write     each rank its part into a hidden folder, flushed to disk
3. complete  rank 0 sees that every file is there, writes the marker, renames the folder

Load (`load.py`): the newest complete folder is verified, compared with the model, read into fresh
tensors, and only then copied into the live ones. If a part refuses on any rank, all parts on all
ranks get back what they had. So a failed load changes nothing, and a failed save leaves the older
folder as it was. A step that fails on one rank fails on all, and says whose fault it was.

Names are those of the bare model, whatever wraps it; optimizer state goes by parameter name and not
by position. So plain and wrapped models, other groupings and other world sizes load each other's.
Nothing is ever unpickled that could run code: `torch.load(weights_only=True)`, and a list of the
classes that `.metadata` may hold.

At another world size the loaded values are the same bits, but training after it sums gradients in
another order. AdamW divides a gradient by its own size, so where it is all rounding (the bias of an
attention's keys) a step of up to the learning rate goes either way. Runs that nobody interrupted
differ as much: 1 and 3 ranks by 3.5e-5 in a weight after nine steps at 1e-3, with SGD by 2e-8.

Cost. A save writes each byte once over all ranks. A load holds the model twice for a moment.

PyTorch counterpart: torch.distributed.checkpoint, which this is built on, and its `state_dict`
module, which is left out: it steps a cold optimizer to find out what its state will be.
"""

from solution.checkpoint.folder import CheckpointError, latest_step
from solution.checkpoint.load import load_checkpoint
from solution.checkpoint.save import Stateful, save_checkpoint

__all__ = [
    "CheckpointError",
    "Stateful",
    "latest_step",
    "load_checkpoint",
    "save_checkpoint",
]
