"""Quantized weights: the methods of linear layers for them, and the conversion of tensors.

Owns how FP8 values and scales are stored, cut for ranks and multiplied, and the choice of each
layer's method.
In: a `QuantizationConfig` and the shares of a layer's outputs and inputs.
Out: a method object for `layers.linear`, and tensors as its parameters take them.
"""
