"""The front end: HTTP, gRPC and metrics over the models of a repository; free of torch.

Owns the wires, the model repository, text pipelines, tokenizers, metrics and statistics.
In: clients' requests; rank 0 of each worker group, which dials in; the supervisor.
Out: responses and streams; requests to engines; loads and unloads of worker groups.
From top to bottom: `main`, `frontend`, the wires `http` and `grpc`, `service`, the rooms.
"""
