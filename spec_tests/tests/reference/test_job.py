"""`python -m solution.train_baseline` and `train_ddp`: flags, files, statuses, equal results."""

import argparse
import importlib
import shutil

import pytest

from spec_tests.tests.reference.launch import run, run_ranks, start
from spec_tests.tests.reference.training import (
    BASELINE,
    DDP,
    FSDP,
    SMALL,
    shard,
    steps,
    summary,
    trained,
    weights,
    write_shards,
)

TIMES = ("tokens_per_s", "step_s")
FULL = "fsdp_full_shard"


def test_a_run_logs_every_step_and_neither_evaluations_nor_checkpointing_change_it(
    data, baseline, tmp_path
):
    flags = ("--eval-every", 2, "--eval-batches", 2, "--activation-checkpointing", "selective")
    ended = trained(data, tmp_path, *flags, "--log-every", 100)

    lines = steps(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s"} <= lines[0].keys()
    assert [line["tokens"] for line in lines] == [128, 128, 128]
    assert ["val_loss" in line for line in lines] == [False, True, True]
    assert summary(tmp_path)["weights_sha256"] == summary(baseline)["weights_sha256"]
    for word in (
        "s since the start",
        "completed",
        "validation loss",
        "tokens/s",
        "peak memory",
        "baseline.jsonl",
    ):
        assert word in ended.out


def test_who_computes_attention_does_not_change_the_losses(data, tmp_path):
    ways = ("sdpa", "plain", "tiled")
    for way in ways:
        (tmp_path / way).mkdir()
        trained(data, tmp_path / way, "--model", "llama", "--attention", way)

    sdpa, *others = (steps(tmp_path / way) for way in ways)
    for other in others:
        for line, wanted in zip(other, sdpa, strict=True):
            assert line["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)


def test_half_precision_trains_nearly_alike(data, baseline, tmp_path):
    trained(data, tmp_path, "--precision", "bf16")

    pairs = zip(steps(tmp_path), steps(baseline), strict=True)
    # 2^-8 is bfloat16's unit in the last place at 1; of a loss near 4 that is 1.6e-2.
    assert max(abs(a["loss"] - b["loss"]) / b["loss"] for a, b in pairs) < 2**-8
    assert summary(tmp_path)["weights_sha256"] != summary(baseline)["weights_sha256"]


def test_two_ranks_end_with_equal_weights_and_the_baselines_losses(data, tmp_path):
    flags = (*SMALL, "--model", "gpt2", "--data", data, "--out", tmp_path, "--max-norm", 1)
    extra = ("--eval-every", 3, "--eval-batches", 2, "--steps", 2)

    ranks = run_ranks(DDP, *flags, *extra, folder=tmp_path)
    run(BASELINE, *flags, *extra, "--eval-batches", 4, folder=tmp_path)

    assert len(set(weights(tmp_path, "ddp_bucketed"))) == 1
    first = summary(tmp_path, "ddp_bucketed.rank0")
    assert first["bytes_per_step"] == first["parameter_bytes"]
    held, whole = first["held_bytes"], first["parameter_bytes"]
    assert held["parameters"] == whole
    assert 2 * whole < held["optimizer"] < 2.1 * whole, "two moments and a count of steps"
    assert first["collectives"]["allreduce_"]["bytes"] == whole
    assert first["val_loss"] == pytest.approx(summary(tmp_path)["val_loss"], rel=1e-6)
    for ours, theirs in zip(steps(tmp_path, "ddp_bucketed"), steps(tmp_path), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    assert ranks[1].out == ""


def test_a_sharded_run_ends_with_the_same_bits(data, tmp_path):
    sharded, plain = tmp_path / "sharded", tmp_path / "plain"
    for flags in (("--zero1", "--out", sharded), ("--no-zero1", "--out", plain)):
        run_ranks(DDP, *SMALL, "--max-norm", 1, "--data", data, *flags, folder=tmp_path)

    assert len({*weights(sharded, "ddp_bucketed"), *weights(plain, "ddp_bucketed")}) == 1
    for ours, theirs in zip(*(steps(x, "ddp_bucketed") for x in (sharded, plain)), strict=True):
        assert {**ours, **dict.fromkeys(TIMES)} == {**theirs, **dict.fromkeys(TIMES)}


def test_a_run_goes_on_in_any_layout(data, tmp_path):
    flags = (*SMALL, "--data", data, "--out", ".", "--checkpoint-dir", "saved", "--save-every", 1)

    run_ranks(DDP, *flags, "--zero1", folder=tmp_path)
    for step in (2, 3):
        shutil.rmtree(tmp_path / "saved" / f"step-{step:08d}")
    first, _ = run_ranks(FSDP, *flags, folder=tmp_path)
    shutil.rmtree(tmp_path / "saved" / "step-00000003")
    alone = run(BASELINE, *flags, "--preset", "tiny", folder=tmp_path)  # that is the default
    says = "param_dtype 'bfloat16' (saved: 'float32')"
    run(FSDP, *flags, "--param-dtype", "bfloat16", folder=tmp_path, status=1, says=says)

    assert "going on after step 1" in first.out
    assert "going on after step 2" in alone.out
    wanted, *others = (steps(tmp_path, name)[-1] for name in ("ddp_bucketed", FULL, "baseline"))
    for found in others:
        for key in ("step", "loss", "grad_norm"):
            assert found[key] == pytest.approx(wanted[key], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (("--steps", 1000), 3, "enough for 23 steps"),
        (("--precision", "fp8"), 2, "precision"),
        (("--model", "bert"), 2, "model"),
        (("--attention", "quick"), 2, "attention"),
        (("--attention", "triton"), 2, "Triton"),
        (("--model", "llama", "--preset", "tiny"), 2, "preset"),
        (("--eval-every", 0), 2, "eval_every"),
        (("--vocab-size", 32), 2, "vocabulary size 32"),
        (("--global-batch-size", 7), 2, "global_batch_size"),
        (("--learning-rate", 1e30), 1, "finite"),
        (("--zero1",), 2, "unrecognized arguments: --zero1"),
        (("--strategy", "HALF_SHARD"), 2, "HALF_SHARD"),
        (("--impl", "other"), 2, "other"),
        (("--param-dtype", "float8"), 2, "float8"),
    ],
    ids=lambda value: "-".join(map(str, value)).strip("-") if isinstance(value, tuple) else None,
)
def test_the_status_tells_why_there_was_no_result(data, tmp_path, flags, status, said):
    module = FSDP if flags[0] in ("--strategy", "--impl", "--param-dtype") else BASELINE
    trained(data, tmp_path, *flags, module=module, status=status, says=said)

    assert [*tmp_path.glob("*.rank0.json")] == []


def test_what_all_ranks_refuse_the_first_one_says(tmp_path):
    write_shards(tmp_path / "data", 1500)
    flags = (*SMALL, "--data", "data", "--eval-every", 2)

    first, second = run_ranks(DDP, *flags, folder=tmp_path, status=2)

    assert "--val-fraction above 0, or train without --eval-every" in first.err
    assert "error" not in second.err


def test_a_dry_run_says_the_numbers_and_writes_nothing(data, tmp_path):
    flags = (*SMALL, "--model", "llama", "--eval-every", 2, "--data", data, "--out", "absent")

    ended = run(BASELINE, *flags, "--dry-run", folder=tmp_path)

    for word in (
        "llama debug",
        "4 micro-batches x 2 x 1 rank(s)",
        "128 tokens",
        "23 steps per pass",
        "every 2 steps",
    ):
        assert word in ended.out
    assert not (tmp_path / "absent").exists()


def test_only_a_word_of_a_files_own_name_says_which_split_it_belongs_to(tmp_path):
    folder = tmp_path / "pretraining"  # "train" is in the path of what is validation data
    folder.mkdir()
    (folder / "pretrain_val_000000.bin").write_bytes(shard(700, seed=9, vocabulary=64))

    flags = (*SMALL, "--data", folder, "--dry-run")
    run(BASELINE, *flags, folder=tmp_path, status=2, says="pretrain_val_000000.bin")


def test_ids_are_checked_in_every_shard_that_is_read(tmp_path):
    for number, words in enumerate((50, 50, 200)):  # one sequence each, of 16 of 30 tokens
        text = shard(30, seed=number, vocabulary=words)
        (tmp_path / f"x_train_{number}.bin").write_bytes(text)

    flags = (*SMALL, "--data", ".", "--global-batch-size", 1, "--micro-batch-size", 1, "--dry-run")
    run(BASELINE, *flags, folder=tmp_path, status=2, says="x_train_2.bin: expected ids below")


def test_the_commands_of_the_demo_are_understood(monkeypatch, tmp_path):
    runs = importlib.import_module("solution.demo.runs")
    config_of = "solution.job.main", lambda wrap, kind, text: kind.from_command_line(text)[0]
    monkeypatch.setattr(*config_of)
    given = argparse.Namespace(out=tmp_path, steps=30, device="cpu", attention="sdpa")
    for each in runs.RUNS:
        script = f"solution.train_{each.division.script}"
        words = runs.command(each, given)
        monkeypatch.setattr("sys.argv", words[words.index(script) :])
        assert importlib.import_module(script).main().name == each.name


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_demo_holds_its_own_checks_and_shows_them(tmp_path):
    ended = start("solution.demo", ("--steps", 5, "--device", "cpu"), folder=tmp_path).wait(500)

    ended.require(0)
    assert "all checks hold" in ended.out
    assert "USDT" not in ended.out + ended.err, "the profiler's own lines"
    page = (tmp_path / "outputs" / "demo" / "index.html").read_text()
    assert "All checks hold" in page
    for title in ("ours, ZeRO-1", "ours, FSDP", "PyTorch&#39;s FSDP", "killed, resumed"):
        assert title in page
    assert "differs</span>" not in page, "the bytes of every run are those of theory"
