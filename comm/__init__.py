"""Control messages between processes and tensor collectives between ranks."""
