"""The faulty and the fixed behaviour of every entry, a file per chapter."""
