"""Tokens: what a shard is, who reads which part of it, and how one goes on after a stop."""
