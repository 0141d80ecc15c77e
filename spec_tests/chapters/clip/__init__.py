"""Chapter clip: one gradient norm, whatever is sharded."""
