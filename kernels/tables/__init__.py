"""Measured choices of tile shapes for matrix products.

Owns the JSON tables by device and the lookup by shape and number of rows. In: a product's
shape; a device's name. Out: the tile shape of a launch, or none for unmeasured shapes.
`benchmarks/tune_products.py` and `tune_experts.py` write the tables; `trimaran tune` writes the
choices of one engine.
"""
