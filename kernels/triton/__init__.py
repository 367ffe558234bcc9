"""Triton kernels and their launches.

Owns norms, rotary positions, sampling, LoRA, expert and elementwise kernels. In: tensors on a
GPU, or on a CPU in Triton's interpreter. Out: the results of `kernels/reference.py`.
`launch.py` lets a kernel begin before its predecessor has ended.
"""
