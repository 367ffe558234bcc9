"""One rank of an engine: scheduling, KV cache and model execution."""
