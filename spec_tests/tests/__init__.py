"""Tests of the suite itself, and of the reference beside it."""
