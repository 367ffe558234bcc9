"""The `trimaran` command and the supervisor of a run."""
