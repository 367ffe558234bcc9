"""`trimaran client`: requests from the command line.

Owns text, token and pipeline clients, with the flags of the TensorRT-LLM backend's scripts. In:
prompts, ids, files, and a server's address. Out: answers on standard output, and checks of
answers against each other. Requests go through `tritonclient`.
"""
