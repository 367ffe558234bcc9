"""The messages between our processes: their fields, their encoding, and large payloads.

In come dataclasses; out go frames of msgpack on a byte stream, and back. `messages.py` lists
every message by direction (engine and front end, child and supervisor), `sampling_params.py`
the sampling fields of a request, and `sampling_fields.py` their wire names and ranges.
`bulk.py` moves large payloads through shared memory, and `supervisor_link.py` is a child's end
of its control connection.
"""
