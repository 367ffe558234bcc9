"""Sharded layers shared by every model."""
