"""Tensor parallelism: how a model's weights are cut and partial results are summed.

Owns the partitioning of heads and widths, and the choice of all-reduce kernels.
In: the sizes of the parallel axes and the collectives of `comm`.
Out: the tensor-parallel group that layers call, with sums fused into norms where possible.
Pipeline and data-parallel links live in `comm/stages`.
"""
