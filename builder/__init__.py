"""Turns a Hugging Face checkpoint into an engine folder."""
