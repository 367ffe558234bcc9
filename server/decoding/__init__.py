"""Long bodies and messages, decoded in helper processes so that the event loop goes on.

Owns the helper processes, their order of work, and the limits of what is decoded.
In: bytes of a body or message with the model that they are for.
Out: a `ParsedInfer` or a `LoadRequest`, or the client's error.
The forms themselves are in `protocol/`.
"""
