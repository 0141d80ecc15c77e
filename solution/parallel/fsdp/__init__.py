"""Fully sharded data parallelism. Read `api.py` first, then what it stands on, from the ground up.

layout.py    where rows lie in a message          policy.py, nested.py   dtypes, and whose
grid.py      who shards, who replicates           param.py     shard and full tensor
unit.py      gather and reduce, start and finish  schedule.py  when: hooks, prefetch, end
api.py       fully_shard, FSDPModule              whole.py     a model in one call
"""
