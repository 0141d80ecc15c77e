"""Standalone scripts that show a finding: `python -m spec_tests repro` writes them.

A script needs torch and the judged file. Templates (`templates/*.txt`) are filled with the
situation that recipes.toml names for a clause; what is kept is a script that was run and showed it.
"""
