"""From flags and a model repository to a checked `ServeConfig`, before any process starts.

In come parsed flags, config.pbtxt files and engine folders; out go the worker groups with
engine configurations, hosts and devices, or a `ConfigError` with the remedy. The `Resolver` is
the entry; the supervisor calls it again for every model that is loaded later. Configurations
are read here, never weights.
"""
