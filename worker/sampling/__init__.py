"""Sampling: from logits to the next token ids.

Owns sampling parameters by row, logits processors, random draws and beam candidates.
In: a step's logits, the rows' parameters and their ids so far.
Out: `SamplerOutput`: ids, log-probabilities and candidates of beams.
Noise depends on seed, sequence and position alone, so a row's result is independent of its
batch.
"""
