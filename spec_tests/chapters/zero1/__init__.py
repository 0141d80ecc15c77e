"""Chapter zero1: the state of the optimizer is divided over the ranks, and nobody can tell."""
