"""`trimaran bench`: servers under load, engines in this process, kernels, and reports.

Owns every sub-command of `trimaran bench` and the machine's limits for comparison. In: flags, a
server's address or a model, and files of earlier results. Out: tables, result lines with
device, versions and command, and plots. The folder `benchmarks/` holds the repository's own
experiments and their results.
"""
