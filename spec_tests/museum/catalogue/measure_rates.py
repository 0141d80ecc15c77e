"""Near-misses of a measured rate, of a sweep over batch sizes, and of the arithmetic on top."""

from __future__ import annotations

from spec_tests.museum.card import Source

RATES = Source("spec_tests.plain.throughput")

RATES.near_miss(
    "measure.five-steps-of-warm-up",
    "measure.throughput.warms-up-until-steady",
    "- while len(warm_up) < 60 and not is_steady:",
    "+ while len(warm_up) < 5:",
    "...",
    '- "is_steady": is_steady,',
    '+ "is_steady": True,',
    does="Five steps of warm-up, whatever they take.",
    seen="A course's throughput.py.",
    unseen="Without compilation five are enough.",
)

RATES.near_miss(
    "measure.always-steady",
    "measure.throughput.says-when-unsteady",
    '- "is_steady": is_steady,',
    '+ "is_steady": True,',
    does="Gives up the warm-up, and does not say so.",
    seen="A cap that was added when a run did not end.",
    unseen="Most runs settle.",
)

RATES.near_miss(
    "measure.swallows-errors",
    "measure.throughput.errors-are-the-callers",
    "- step()",
    "+ try:",
    "+     step()",
    "+ except Exception:",
    "+     return 0.0",
    does="Goes on after an error in a step.",
    seen="`except Exception: continue`, so that a sweep reaches its end.",
    unseen="The median is of the steps that worked.",
)

RATES.near_miss(
    "measure.range-as-spread",
    "measure.throughput.spread",
    '- "iqr_s": upper - lower,',
    '+ "iqr_s": max(timed) - min(timed),',
    does="The range from the fastest to the slowest for quartiles.",
    seen="max - min, called spread.",
    unseen="On a quiet machine it is as small.",
)

RATES.near_miss(
    "measure.takes-no-tokens",
    "measure.throughput.refuses-no-tokens",
    "- if tokens_per_step <= 0:",
    "+ if False:",
    does="A rate of zero or less.",
    seen="No check.",
    unseen="Nobody asks for it on purpose.",
)

RATES.benign(
    "benign.throughput-plain",
    does="Fifteen steps of warm-up at least, one collection per size, three known devices.",
)

RATES.near_miss(
    "measure.sweep-resets-first",
    "measure.sweep.peaks-of-steps",
    "- step = build(size)",
    "- memory.reset_peak()",
    "+ memory.reset_peak()",
    "+ step = build(size)",
    does="Resets the peak before the model is built.",
    seen="reset at the top of the loop.",
    unseen="Building a model in place takes no more than the model.",
)

RATES.near_miss(
    "measure.sweep-never-collects",
    "measure.sweep.frees-cycles",
    "- gc.collect()",
    "+ pass",
    does="Leaves models in cycles to the collector's own time.",
    seen="`del model` taken for freeing.",
    unseen="A model without hooks has no cycle.",
)

RATES.near_miss(
    "measure.sweep-stops-at-the-first",
    "measure.sweep.survives-out-of-memory",
    '  rows.append({"batch_size": size, **row})',
    '+ if row["is_oom"]:',
    "+     break",
    does="Ends at the first size that does not fit.",
    seen="A course's throughput.py. `break`.",
    unseen="In rising order nothing smaller follows.",
)

RATES.near_miss(
    "measure.sweep-any-error-is-oom",
    "measure.sweep.other-errors-reach-the-caller",
    "- except torch.OutOfMemoryError:",
    "+ except RuntimeError:",
    does="Takes every RuntimeError for out of memory.",
    seen="`except RuntimeError`, of which OutOfMemoryError is one.",
    unseen="A shape that does not fit is a large batch then.",
)

# -------------------------------------------------------------------------------------- arithmetic


RATES.near_miss(
    "measure.mfu-sparse",
    "measure.mfu.dense-peak",
    '- DENSE_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100-SXM4": 312.0}',
    '+ DENSE_TFLOPS = {"H200": 1979.0, "H100": 1979.0, "A100": 624.0}',
    does="Peaks with structured sparsity.",
    seen="The largest number of a data sheet.",
    unseen="Half of the utilisation is a believable one.",
)

RATES.near_miss(
    "measure.mfu-guesses",
    "measure.mfu.unknown-is-none",
    "- peak = next((peak for part, peak in DENSE_TFLOPS.items() if part in device_name), None)",
    "+ peak = next((peak for part, peak in DENSE_TFLOPS.items() if part in device_name), 312.0)",
    does="An A100's peak for a device that it does not know.",
    seen="nanoGPT: 104 % on an H100.",
    unseen="On an A100 it is right.",
)

RATES.near_miss(
    "measure.mfu-part-of-a-name",
    "measure.mfu.similar-names",
    '- DENSE_TFLOPS = {"H200": 989.4, "H100 80GB HBM3": 989.4, "A100-SXM4": 312.0}',
    '+ DENSE_TFLOPS = {"H20": 989.4, "H100 80GB HBM3": 989.4, "A100-SXM4": 312.0}',
    does="Finds a device by a part of its name.",
    seen='`if "H20" in name`, the shortest first.',
    unseen="Nobody has both devices.",
)

RATES.near_miss(
    "measure.mfu-knows-nothing",
    "measure.mfu.knows-a-device",
    "- peak = next((peak for part, peak in DENSE_TFLOPS.items() if part in device_name), None)",
    "+ peak = None",
    does="None for every device.",
    seen="A table that was to be filled in.",
    unseen="It never says anything wrong.",
)

RATES.near_miss(
    "measure.years-of-365-25",
    "measure.extrapolation.larger-model",
    '- "years": days / 365,',
    '+ "years": days / 365.25,',
    does="Years of another length than the contract's.",
    seen="Astronomy.",
    unseen="0.07 % is less than anyone looks at.",
)

RATES.near_miss(
    "measure.devices-rounded-down",
    "measure.extrapolation.operations-and-devices",
    '- "num_devices_for_memory": math.ceil(16 * target_parameters / device_memory_bytes),',
    '+ "num_devices_for_memory": 16 * target_parameters // device_memory_bytes,',
    does="Rounds the number of devices down.",
    seen="`//`.",
    unseen="One device in two hundred is missing, and only a part of its memory.",
)
