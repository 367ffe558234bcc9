"""A row's sampling parameters in a GPU's memory: int32 words; floats are stored as their
bits.
"""

from __future__ import annotations

# Columns. The seed's 64 bits occupy the first two.
(
    SEED, SEED_HIGH, SEQUENCE, NUM_PROMPT, TEMPERATURE, TOP_K, TOP_P, MIN_P, TOP_P_DECAY,
    TOP_P_MIN, REPETITION, PRESENCE, FREQUENCY, MIN_TOKENS, END_ID, NGRAM,
) = range(16)  # fmt: skip
END_IDS = 16
"""The first of `NUM_END_IDS` further end ids; -1 stands for none."""

NUM_END_IDS = 16
"""A power of two, as a kernel reads all of them at once."""

WIDTH = END_IDS + NUM_END_IDS
"""Words of a row. Temperature 0 means greedy, whatever the filters are."""
