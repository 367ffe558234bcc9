"""The flags of `trimaran serve` and the parser that every command uses.

In comes a command line, or the YAML file that ``--config`` names; out goes a namespace of typed
values. Spellings of the launch script of Triton's TensorRT-LLM backend and of tritonserver are
taken; flags without a counterpart are refused or noted as idle. Values are checked against each
other in `resolution`, not here.
"""
