"""Ranks: processes that live between calls, what they did, and what this machine lends them."""
