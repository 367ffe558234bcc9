"""LoRA adapters: formats, caches on host and device, and their part in a step.

Owns which adapters are cached, and the copy of a rank's shard into its slots.
In: adapters that requests bring or name, or folders of adapters.
Out: slots per step that linear layers add to their products.
Rank 0 reads and checks an adapter; the others receive it.
"""
