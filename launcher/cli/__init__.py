"""The subcommands of `trimaran`: one module each, named like the command.

In come the words of a command line; out go printed lines and an exit code: 0, 1 for a failure,
2 for an operator's mistake. Each module has `add_arguments(parser)` and `run(args)`. `build`,
`client` and `bench` live in packages of their own; `main.SUBCOMMANDS` lists all.
"""
