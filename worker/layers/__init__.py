"""Sharded layers that model families share.

Owns linear layers, embeddings, norms, rotary positions and mixtures of experts.
In: a tensor-parallel group, the kernels chosen for the device, and shapes.
Out: `nn.Module`s with this rank's shard of each weight, and loaders that fill the shards.
Quantization and LoRA plug in as a layer's method object (`methods.py`).
"""
