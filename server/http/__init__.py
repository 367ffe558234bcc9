"""The HTTP wire: routes, bodies, limits and the operator's page.

Owns connections, request bodies (long ones are parsed in processes apart) and answers.
In: HTTP requests on the serving port and on the metrics port.
Out: calls of `Service`, and JSON, binary or event-stream answers.
JSON forms themselves are in `protocol/`.
"""
