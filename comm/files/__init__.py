"""Files and values that operators write: the same reading, checks and refusals everywhere.

In come paths, JSON values and words of a command line; out go texts, typed values, or a
`ConfigError` that names file, key and remedy. Output files are checked before a command begins
and are replaced whole. No module here depends on models or engines.
"""
