"""Instruments: they watch a run and change no number of it."""
