"""Weights: read from files and copied into a rank's model.

Owns checkpoint naming, memory-mapped files and parallel reads to the device.
In: Hugging Face checkpoints, rank files of an engine folder, or a seed.
Out: filled parameters of a sharded model.
The builder writes rank files with the same loader.
"""
