"""Chapter trainer: whoever owns forward, backward and step trains as one process does."""
