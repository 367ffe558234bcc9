"""Batch jobs: templates, what fills them, and the commands that submit and stop them."""
