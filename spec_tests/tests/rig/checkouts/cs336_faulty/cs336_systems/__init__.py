"""A solution of CS336 assignment 2."""
