"""The JSON forms of the protocol, shared by the wires and the body process.

Owns strict JSON reading, ``infer`` and ``generate`` bodies, load requests. In: bytes or parsed
objects of one body. Out: an `InferRequest` with its wire inputs, or an answer's body. Clients
match the error texts.
"""
