"""The training loop: accumulation, normalisation, clipping, what is reported."""
