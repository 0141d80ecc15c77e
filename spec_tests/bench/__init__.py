"""Side-by-side measurements through the contract: ratios, never absolute times."""
