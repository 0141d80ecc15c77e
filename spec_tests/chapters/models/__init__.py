"""Models: what a language model promises to a training loop."""
