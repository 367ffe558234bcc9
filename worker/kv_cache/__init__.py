"""Blocks of keys and values: who holds them and what they contain."""
