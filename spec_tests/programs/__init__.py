"""The world model: situations as lines of text, one oracle with its faults, a generator.

scene.py      what exists before the first call: words, one for each axis
calls.py      what a trainer calls, one call after another; which calls are legal (words.py)
alone.py      one process that does what all ranks should: the oracle; faults.py: wrong worlds
on_ranks.py   the same calls on a rank; ways.py: how each function divides training; units.py: units
machine.py    follows the calls of a program, wherever it runs; has those that are alike everywhere
stepped.py    the same of a sharded optimizer, in one process and on a rank
trained.py    the same of a trainer that owns its loop; one_trainer.py: its oracle
pieces.py     what a rank has of a tensor; the parent puts pieces together
law.py        the law: a situation does on the ranks what it does in one process
look.py       what a situation shows beside values: form, and an ordinary step afterwards
sent.py       what each call sends, and what is shown in full afterwards
draw.py       situations drawn at random, in scenes in which every two words meet
explore.py    the command: draw, judge, shrink, until the time is over
seeds.toml    situations that once told a fault; they are tried first (seeds.py)
declared.py   situations that an implementation declares to do otherwise
"""
