"""Compute kernels, each with its plain torch twin."""
