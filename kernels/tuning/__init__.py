"""Times candidates of the choosers of kernels on the GPU, for the products of one engine.

Owns the candidates and the timing. In: sizes of products and of stacks of experts. Out: the
entries of `tables.tuned_choices`.
"""
