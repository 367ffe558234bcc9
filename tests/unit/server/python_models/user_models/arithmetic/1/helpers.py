"""Imported by the neighbouring model, absolutely and relatively."""

FACTOR = 2.0
