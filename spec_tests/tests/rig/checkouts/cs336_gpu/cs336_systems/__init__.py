"""Written for a GPU, and run on nothing else."""
