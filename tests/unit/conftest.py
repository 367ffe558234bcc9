"""Settings of all unit tests."""

import os

# Triton reads this when kernels are defined: its interpreter runs them without a GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")
