"""A solution of CS336 assignment 2."""

import importlib.metadata

__version__ = importlib.metadata.version("cs336-systems")
