"""Load balance of experts over the ranks that share them.

Owns expert loads, the placement of experts in slots, and their moves between ranks.
In: counts of routed tokens, read without a host wait.
Out: a new placement and the weights moved for it; reports for metrics.
The layer itself is `layers/experts.py`.
"""
