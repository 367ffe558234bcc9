"""The model repository on disk.

Owns config.pbtxt files: their keys, their parameters, roles, tensors and templates. In: a
folder. Out: a `RepositoryModel` for each model, or a `ConfigError` that names file and line.
This package starts and serves no models.
"""
