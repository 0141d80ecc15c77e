"""Chapter attention: exact attention in O(N) memory, forward and backward."""
