"""The HTTP, gRPC and metrics front end. Never imports torch."""
