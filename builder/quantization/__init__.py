"""`trimaran quantize`, and what a text tells of a model: scales, and layers that need floats.

Owns the quantized forms that are made here, and calibration of weights and KV scales.
In: a Hugging Face folder of floats, and a text.
Out: a Hugging Face folder of quantized weights, or the KV scales of an engine folder.
Rounding and packing are in `worker/quantization/`, which loads the same forms.
"""
