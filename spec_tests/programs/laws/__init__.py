"""Laws: judgements that many clauses share, with hints at the likely cause of a failure.

equivalence   gradients and weights equal those of one process with the whole batch
agreement     all ranks hold the same bits, issue the same collectives
traffic       what is sent, how often, how many bytes, in which order
footprint     bytes that stay, by named terms
stream        which tokens each rank receives, batch by batch
durability    whatever happened to the disk: one whole saved state, or an error
refusal       right, or a clear error; never a hang
"""
