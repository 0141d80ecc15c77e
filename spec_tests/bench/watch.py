"""What `trainspec watch` costs: steps of one run, by turns with and without the probe.

The run is a real one, under `watch` and torchrun: GPT of 25M parameters, DDP, AdamW, on gloo. In
each pair of steps the probe is asleep for one, so both meet the same moment of the machine. Steps
of a model that computes more than this one per parameter cost less in proportion: what the probe
does is one pass over gradients and weights.
"""

import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

from spec_tests.bench import runner
from spec_tests.rig.ranks.world import Worlds
from spec_tests.rig.report.text import grid
from spec_tests.watch import command

MOST = 1.05
MOST_CPU = 1.15
SCRIPT = textwrap.dedent(
    """
    import json, sys, time
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    pairs, tokens, out = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(6000, 512), body, nn.Linear(512, 6000))
    size = sum(p.numel() for p in model.parameters())
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.manual_seed(1 + dist.get_rank())
    watcher = sys.modules["trainspec_watch.guard"].Current
    probe, seconds, busy = watcher.probe, {True: [], False: []}, {True: [], False: []}
    for step in range(2 * pairs + 4):
        is_watched = step < 2 or step % 4 in (0, 3)  # ABBA
        x = torch.randint(6000, (tokens // 128, 129))
        watcher.probe = probe if is_watched else None
        begun, used = time.perf_counter(), time.process_time()
        logits = model(x[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 4:
            seconds[is_watched].append(time.perf_counter() - begun)
            busy[is_watched].append(time.process_time() - used)
    watcher.probe = probe
    if dist.get_rank() == 0:
        with open(out, "w") as file:
            found = {"watched": seconds[True], "bare": seconds[False], "size": size}
            json.dump(found | {"watched_cpu": busy[True], "bare_cpu": busy[False]}, file)
    dist.destroy_process_group()
    """
)


class Watch(runner.Benchmark):
    """Time and CPU time of a step with the probe, over the same without."""

    name = "watch"
    title = "Watching a run"
    options = {
        "--pairs": {"type": int, "default": 12, "help": "steps of each arm"},
        "--tokens": {"type": int, "default": 1024, "help": "of each rank and step"},
    }

    def sections(self, options: argparse.Namespace, worlds: Worlds) -> Iterator[runner.Section]:
        """One run of two ranks."""
        with tempfile.TemporaryDirectory() as folder:
            script, out = Path(folder) / "train.py", Path(folder) / "seconds.json"
            script.write_text(SCRIPT)
            asked = [str(options.pairs), str(options.tokens), str(out)]
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            with (
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()),
            ):
                # Asleep for a step, the probe takes two steps for one: the verdict means nothing.
                command.main(["--", *launch, "--nproc-per-node=2", str(script), *asked])
            found = json.loads(out.read_text())
        rows = [["measure", "parameters", "tokens per rank", "bare: s", "watched: s", "ratio"]]
        said = []
        kinds = (("step", "", "takes", MOST), ("CPU time of a step", "_cpu", "is", MOST_CPU))
        for title, key, verb, most in kinds:
            arms = [found[name + key] for name in ("bare", "watched")]
            ratios = [watched / bare for bare, watched in zip(*arms, strict=True)]
            middle = statistics.median(ratios)
            times = [f"{statistics.median(arm):.3f}" for arm in arms]
            shown = f"{middle:.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"
            size = f"{found['size'] / 1e6:.1f}M"
            rows.append([title, size, str(options.tokens), *times, shown])
            words = f"a watched {title} {verb} {middle:.3f} times as long, at most {most}"
            said.append(runner.verdict(middle <= most, words))
        yield runner.Section("", [grid(rows), runner.bullets(said)], found)


BENCHMARK = Watch()
