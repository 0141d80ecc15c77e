"""A loader's state_dict right after load_state_dict is that of the start, not what was loaded.

Expected: a checkpoint written between a resume and its first batch resumes at batch 2
Got: it resumes at batch 0
Versions: accelerate 1.15.0, torch 2.13.0, checked 2026-11-23
Clause: data.state.of-what-was-loaded, data.state.of-a-resumed-pass
Issue: https://github.com/huggingface/accelerate/pull/4244
"""

from accelerate.data_loader import prepare_data_loader
from torch.utils.data import DataLoader

RANKS = 2


def _loader() -> DataLoader:
    one_rank = {"num_processes": 1, "process_index": 0}
    return prepare_data_loader(DataLoader(range(6)), use_stateful_dataloader=True, **one_rank)


def observe(rank: int) -> tuple[object, object]:
    """Return where a loader goes on that was stopped after 2 batches and resumed twice."""
    first, second, third = _loader(), _loader(), _loader()
    batches = iter(first)
    next(batches), next(batches)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    return 2, next(iter(third)).item()
