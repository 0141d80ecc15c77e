"""Chapter checkpoint: what is saved, what comes back, and what a crash may leave."""
