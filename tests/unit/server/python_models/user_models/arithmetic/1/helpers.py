"""Imported by the model beside it, both ways."""

FACTOR = 2.0
