"""The model repository on disk.

Owns config.pbtxt files: their keys, their parameters, roles, tensors and templates.
In: a folder.
Out: a `RepositoryModel` for each model, or a `ConfigError` that names file and line.
Nothing here starts or serves a model.
"""
