"""CUDA C++ kernels for Hopper, compiled by NVRTC and launched through the driver.

Owns `csrc/`, compilation, launches, and the placement of data on the two L2 partitions. In:
bf16 and float16 tensors on a GPU of compute capability 9.0. Out: attention, matrix products,
grouped products and fused sums with norms. Unsupported inputs go to Triton's kernels instead.
"""
