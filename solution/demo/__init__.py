"""The demonstration, `make demo`; `__main__.py` is its manual."""
