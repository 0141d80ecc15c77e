"""Implementations that are known by name, behind the contract."""
