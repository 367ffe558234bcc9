"""Networks that draft: they propose tokens inside the ranks, from the target's hidden states.

In come the token ids of a step, their positions and hidden states of the target; out go ids
that probably follow. `execution.draft_runner` runs a network after each step of the target.
"""
