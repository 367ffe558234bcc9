"""`trimaran build`, `convert`, `verify` and `convert-lora`: engine folders and adapters.

Owns the plan of a build, parallel writing, its journal and checksums.
In: a Hugging Face checkpoint or a GGUF file, parallel sizes and limits.
Out: an engine folder that appears whole or not at all.
The worker's weight loader shards the weights, so a folder equals a load with the same sizes.
"""
