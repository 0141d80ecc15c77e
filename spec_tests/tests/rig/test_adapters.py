"""What an adapter of a course does is not charged to whoever wrote the checkout."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from spec_tests import impls
from spec_tests.chapters.ddp import test_construction, test_gradients
from spec_tests.chapters.fsdp import test_casts, test_refusals
from spec_tests.impls import course, cs336, effdl
from spec_tests.rig import target
from spec_tests.rig.outcomes import Outcome
from spec_tests.rig.ranks.world import Worlds
from spec_tests.tests.rig.helpers import CHECKOUTS, checkout_of_2025, judged, replaced

EFFDL = impls.parse(f"effdl:{CHECKOUTS / 'effdl' / 'fsdp.py'}")


# ------------------------------------------------------------------------------------------ CS336


def test_the_exercise_of_cs336_has_no_causal_mask_that_is_not_square():
    attention = cs336._attention(lambda: SimpleNamespace(apply=lambda q, k, v, causal=False: q))
    q, k = torch.ones(1, 4, 2), torch.ones(1, 6, 2)
    with pytest.raises(NotImplementedError, match="as many queries as keys; got 4 and 6"):
        attention(q, k, k, causal=True)
    assert attention(q, k, k).shape == attention(q, q, q, causal=True).shape == (1, 4, 2)


def test_a_batch_of_cs336_begins_once_however_many_backwards_it_has():
    calls: list[str] = []
    hooks: Any = SimpleNamespace(
        get_ddp_bucketed=lambda module, bucket_size_mb: torch.nn.Sequential(module),
        ddp_bucketed_on_train_batch_start=lambda wrapped, optimizer: calls.append("start"),
        ddp_bucketed_on_after_backward=lambda wrapped, optimizer: calls.append("finish"),
    )
    functions: dict[str, Any] = {}
    finishing: dict[Any, Any] = {}
    cs336._offer_ddp(hooks, functions, finishing)
    wrapped = functions["ddp_bucketed"](torch.nn.Linear(2, 2), bucket_size_mb=1.0)
    for _ in range(2):
        for _ in range(2):
            wrapped(torch.ones(1, 2)).sum().backward()
        finishing[wrapped](wrapped, None)
    assert calls == ["start", "finish"] * 2
    wrapped(torch.ones(1, 2)).sum().backward()
    wrapped.zero_grad()  # after an exception, say: what was begun is over
    wrapped(torch.ones(1, 2))
    assert calls[4:] == ["start", "start"]


@pytest.fixture(scope="module")
def plain_classes(tmp_path_factory: pytest.TempPathFactory) -> target.Target:
    """A checkout whose DDP wrappers are no nn.Module: called, with `parameters`, and no more."""
    folder = tmp_path_factory.mktemp("plain") / "checkout"
    words = checkout_of_2025(folder)
    replaced(
        folder / "cs336_systems" / "ddp.py",
        ("class OverlappedDDP(nn.Module)", "class OverlappedDDP"),
        ("super().__init__()", "self.parameters = module.parameters"),
        ("def forward", "def __call__"),
    )
    return impls.parse(words)


CALLED = test_construction.test_forward_is_unchanged
TRAINED = test_gradients.test_frozen_stay_none
MODES = test_construction.test_the_wrapper_passes_on_parameters_and_modes


@pytest.mark.parametrize("subject", ["ddp", "ddp_bucketed"])
@pytest.mark.parametrize(
    ("test", "parameters"),
    [(CALLED, {"situation": "mlp: evaluate 0"}), (TRAINED, {}), (MODES, {})],
    ids=["called", "trained", "asked for a mode"],
)
def test_a_wrapper_that_is_no_module_is_judged_by_what_it_does(
    worlds: Worlds, plain_classes: target.Target, subject, test, parameters
):
    found = judged(plain_classes, worlds, test, {"world": 2, "subject": subject, **parameters})
    wanted = Outcome.FAILED if test is MODES else Outcome.PASSED
    assert found.outcome is wanted, found.message
    assert test is not MODES or "expected a module, which has eval, got " in found.message


# ----------------------------------------------------------------------------------- Efficient DL


CASTS = test_casts.test_each_unit_casts_what_its_own_policy_names
REFUSES = test_refusals.test_bad_input_is_an_error_on_every_rank_by_the_first_step


@pytest.mark.parametrize(
    ("test", "parameters"),
    [
        (CASTS, {"policy": "default"}),
        (CASTS, {"policy": "inputs-as-they-are"}),
        (REFUSES, {"case": "sharded-twice"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
def test_a_right_file_of_efficient_dl_passes_beyond_its_course(worlds: Worlds, test, parameters):
    case = {"world": 2, "subject": "fully_shard", **parameters}
    found = judged(EFFDL, worlds, test, case)
    assert found.outcome is Outcome.PASSED, found.message


def test_all_units_of_a_model_share_one_context():
    """As in the exercise's script: a file may keep there what it has sharded."""
    fully_shard = effdl.offer(CHECKOUTS / "effdl" / "fsdp.py", "cpu").fully_shard
    contexts: list[Any] = []
    fully_shard.file.fully_shard = lambda module, comm_ctx, **_: contexts.append(comm_ctx)
    mesh: Any = SimpleNamespace(ndim=1, device_type="cpu", size=lambda: 1)
    models = [torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) for _ in range(2)]
    for model in models:
        for unit in (*model, model):
            fully_shard(unit, mesh=mesh)
    assert [contexts.index(each) for each in contexts] == [0, 0, 0, 3, 3, 3]


def test_a_unit_of_efficient_dl_is_gathered_by_its_hooks_alone():
    """There `unshard` only launches a gather, so a unit looks sharded after a call of the suite."""
    fully_shard = effdl.offer(CHECKOUTS / "effdl" / "fsdp.py", "cpu").fully_shard
    mesh: Any = SimpleNamespace(ndim=1, device_type="cpu", size=lambda: 1)
    calls: list[int] = []
    fully_shard.file.fully_shard = lambda unit, **_: setattr(
        unit, "unshard", lambda: calls.append(1)
    )
    unit: Any = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match="by hand"):
        unit.unshard()
    exec("unit.unshard()", {"__name__": "fsdp", "unit": unit})  # as a hook of the file does
    assert calls == [1]


def test_what_the_exercise_did_not_have_in_2025_is_not_offered():
    """An attribute that no line of a file reads would be set in vain, and the file judged by it."""
    fully_shard = effdl.offer(CHECKOUTS / "effdl" / "fsdp.py", "cpu").fully_shard
    mesh: Any = SimpleNamespace(ndim=1, device_type="cpu", size=lambda: 1)
    kind = type("Unit", (fully_shard.file.FSDPModule, torch.nn.Linear), {})
    fully_shard.file.fully_shard = lambda unit, **_: setattr(unit, "__class__", kind)
    unit: Any = fully_shard(torch.nn.Linear(2, 2), mesh=mesh)
    with pytest.raises(NotImplementedError, match="reduce_grads"):
        unit.set_requires_gradient_sync(False)


# ------------------------------------------------------------------------------------- the course


class Taking:
    """A loader as the course writes it."""

    def __init__(self, file_paths, local_batch_size, sequence_length, device, rank=0, world_size=1):
        self.file_paths = file_paths


def test_a_loader_with_a_second_name_is_one_loader():
    module = ModuleType("data.distributed_data_loader")
    kind = type("DistributedDataLoader", (Taking,), {"__module__": module.__name__})
    module.DistributedDataLoader = module.DataLoader = kind  # type: ignore[attr-defined]  # alias
    made = course._loader(module, "cpu")["token_loader"](["x"], batch_size=1, sequence_length=2)
    assert made.theirs.file_paths == ["x"]
    module.Other = type("Other", (kind,), {"__module__": module.__name__})  # type: ignore[attr-defined]  # two
    with pytest.raises(ValueError, match=r"got \['DistributedDataLoader', 'Other'\]"):
        course._loader(module, "cpu")


@pytest.mark.parametrize(
    ("text", "is_used"),
    [
        ("# as transformers does it\nimport torch\n", False),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers\n", False),
        ("import transformers\n", True),
        ("from transformers import GPT2Config as Config\n", True),
    ],
    ids=["a comment", "for types only", "the package", "a class of it"],
)
def test_the_config_of_transformers_is_for_files_that_use_it(
    monkeypatch, tmp_path: Path, text: str, is_used: bool
):
    package = ModuleType("transformers")
    package.GPT2Config = type(  # type: ignore[attr-defined]  # in the place of the real package
        "GPT2Config", (SimpleNamespace,), {"__module__": "transformers.models.gpt2"}
    )
    monkeypatch.setitem(sys.modules, "transformers", package)
    path = tmp_path / "my_gpt2.py"
    path.write_text(text + "def MyGPT2LMHeadModel(config):\n    return config\n", encoding="utf-8")
    module = ModuleType("model.my_gpt2")
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), vars(module))
    config = course._config(module, {"n_layer": 2})
    assert isinstance(config, package.GPT2Config) == is_used
    assert config.n_layer == 2
