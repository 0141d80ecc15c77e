"""Deliberate near-misses. (Filled below.)"""
def rejected_by():
    return {}
