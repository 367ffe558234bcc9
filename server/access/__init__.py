"""Access control: permissions of clients by port, TLS, and the limits of connections.

Owns Triton's restricted APIs, API keys, the split into serving and administration ports,
certificates, and the deadlines and bounds that the ports enforce.
In: the flags' values, files of keys and certificates, categories and headers of requests.
Out: a `Refusal` or none; TLS contexts that follow their files.
The room is independent of protocols: `server/http` and `server/grpc` ask and enforce.
"""
