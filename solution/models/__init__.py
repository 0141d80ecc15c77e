"""Models; attention is injected, and nothing here knows how training is spread."""
