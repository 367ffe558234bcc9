"""Tensor parallelism: the sharding of weights and the sum of partial results.

Owns the partitioning of heads and widths, and the choice of all-reduce kernels.
In: the sizes of the parallel axes and the collectives of `comm`.
Out: the tensor-parallel group that layers call, with all-reduces fused into norms if possible.
Pipeline and data-parallel links live in `comm/stages`.
"""
