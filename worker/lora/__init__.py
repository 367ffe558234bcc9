"""LoRA adapters: their formats, the caches that hold them, and what they add to a layer."""
