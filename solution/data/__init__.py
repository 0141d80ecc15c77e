"""From text to batches: prepare -> shards -> loader."""
