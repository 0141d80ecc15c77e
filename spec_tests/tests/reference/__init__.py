"""The reference's own commands, run as a user runs them: by module name, in a process of their own.

No clauses: these judge `solution` alone, and import nothing of it. What any implementation must do
is in the chapters.
"""
