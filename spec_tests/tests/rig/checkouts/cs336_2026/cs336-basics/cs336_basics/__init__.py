"""What assignment 1 leaves to assignment 2."""
