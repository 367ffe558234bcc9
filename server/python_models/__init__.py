"""Models that users wrote in Python, each run by processes of its own."""
