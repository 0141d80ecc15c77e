"""The demonstration, `make demo`: GPT-2 learns from real text in many ways, with equal losses.

1. Shards from the sources of Python's standard library, tokenizer included; reused the second time.
2. One rank: the baseline. One rank with half the micro-batch: the control. It computes the same
   mean in another order of summation, and so measures how far rounding alone drives two right runs
   apart.
3. Two ranks, same seed, data and global batch: DDP (one reduction per parameter), bucketed DDP,
   PyTorch's DDP; ZeRO-1; FSDP in each strategy, and PyTorch's.
4. Two ranks, one of which is killed with SIGKILL in the middle: torchrun starts both anew, and they
   go on from the last save.
5. What the specification says of it all, where `make check` has left its report.

Then a table, a page (OUT/index.html, out of OUT/results.json), and checks that decide the exit
status:

- losses and gradient norms lie within 10 times the control's distance from the baseline (plus 8
  float32 units in the last place, should the control happen to agree bit for bit);
- the ranks of each run end with the same weights, bit for bit;
- each run sends as many bytes per step as its algorithm needs, for instance each gradient once and
  not once per micro-batch;
- the run with the kill has every loss, gradient norm and final weight of the same run without, bit
  for bit.

    python -m solution.demo [--steps 30] [--out outputs/demo] [--device auto] [--attention sdpa]

`runs` starts them, `results` gathers and predicts, `checks` judges, `page` draws (with matplotlib).
One thread per rank: two would fight for two cores.
"""
