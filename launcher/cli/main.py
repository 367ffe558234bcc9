"""The `trimaran` command: finds the subcommand, runs it, turns errors into exit codes."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, cast

from trimaran.comm.errors import ConfigError, TrimaranError
from trimaran.launcher.flags.parser import FlagParser

EXIT_FAILURE = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Subcommand:
    """One subcommand. Its module has ``add_arguments(parser)`` and ``run(args) -> int``."""

    module: str
    summary: str
    example: str


SUBCOMMANDS: dict[str, Subcommand] = {
    "serve": Subcommand(
        "trimaran.launcher.cli.serve",
        "serve a model repository",
        "trimaran serve --model-repo repository --world-size 2",
    ),
    "build": Subcommand(
        "trimaran.builder.cli",
        "turn a Hugging Face checkpoint into an engine folder",
        "trimaran build --checkpoint llama --output engine --tp-size 2",
    ),
    "convert": Subcommand(
        "trimaran.builder.convert",
        "do the first half of a build in two steps",
        "trimaran convert --model-dir llama --output-dir checkpoint --tp-size 2",
    ),
    "quantize": Subcommand(
        "trimaran.builder.quantization.quantize",
        "turn a Hugging Face folder of floats into one of FP8 weights",
        "trimaran quantize --checkpoint llama --output llama-fp8",
    ),
    "tune": Subcommand(
        "trimaran.launcher.cli.tune",
        "measure which kernels are fastest for an engine on this GPU",
        "trimaran tune --engine engine",
    ),
    "verify": Subcommand(
        "trimaran.builder.verify",
        "compare an engine folder's weights with their checksums",
        "trimaran verify --engine engine",
    ),
    "convert-lora": Subcommand(
        "trimaran.builder.convert_lora",
        "turn a PEFT adapter into the files that requests carry",
        "trimaran convert-lora -i adapter --storage-type float16 -o adapter-files",
    ),
    "init-repo": Subcommand(
        "trimaran.launcher.cli.init_repo",
        "write a model repository",
        "trimaran init-repo repository --defaults --fill engine_dir:/e,tokenizer_dir:/t",
    ),
    "fill-template": Subcommand(
        "trimaran.launcher.cli.fill_template",
        "fill ${...} values of a config.pbtxt",
        "trimaran fill-template -i config.pbtxt engine_dir:engine,decoupled_mode:True",
    ),
    "client": Subcommand(
        "trimaran.client.cli",
        "send requests",
        "trimaran client text -p 'What is machine learning?' --streaming",
    ),
    "bench": Subcommand(
        "trimaran.bench.cli",
        "measure throughput and latency",
        "trimaran bench --input-len 128 --output-len 128 --concurrency 16 --num-requests 200",
    ),
    "slurm": Subcommand(
        "trimaran.launcher.cli.slurm",
        "render, submit and stop batch jobs",
        "trimaran slurm submit --model-repo repository --world-size 2 --gpus-per-node 2",
    ),
    "doctor": Subcommand(
        "trimaran.launcher.cli.doctor",
        "say what will and won't work on this machine",
        "trimaran doctor",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 2 for an operator's mistake."""
    words = list(sys.argv[1:] if argv is None else argv)
    _open_standard_streams()
    try:
        with watched_output():
            return _dispatch(words)
    except ConfigError as error:
        _print_error(error)
        return EXIT_CONFIG
    except ReaderGoneError:
        return EXIT_FAILURE  # silent, like other programs whose pipe has closed
    except TrimaranError as error:
        _print_error(error)
        return EXIT_FAILURE
    except OSError as error:
        # A path is too long, whichever function uses the path first.
        if error.errno != errno.ENAMETOOLONG:
            raise
        _print_error(f"{error.filename}: {error.strerror}")
        return EXIT_CONFIG
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        # The interpreter exits with 120 if lines of standard error are left.
        _drop_the_rest(sys.stderr)


def _print_error(error: object) -> None:
    """Print the reason of a failure. A full disk at standard error changes no exit code."""
    with contextlib.suppress(OSError):
        print(f"trimaran: error: {error}", file=sys.stderr)


def _open_standard_streams() -> None:
    """Open standard streams that were closed at the start on /dev/null: otherwise a socket
    would get their descriptor and our output. File names that are not UTF-8 can be printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    # Python does this by itself only in the locales C and POSIX.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("--help", "-h", "help"):
        print(_overview())
        return 0 if words else EXIT_CONFIG
    if name in ("--version", "-V"):
        print(f"trimaran {_version()}")
        return 0
    subcommand = SUBCOMMANDS.get(name.replace("_", "-"))
    if subcommand is None:
        known = ", ".join(SUBCOMMANDS)
        raise ConfigError(f"{name!r} is not a command. Commands are {known}.")
    module = importlib.import_module(subcommand.module)
    return int(module.run(parser_of(name).parse(words[1:])) or 0)


def parser_of(name: str) -> FlagParser:
    """The parser of one of `SUBCOMMANDS`, with all its flags."""
    subcommand = SUBCOMMANDS[name.replace("_", "-")]
    summary = subcommand.summary
    parser = FlagParser(
        prog=f"trimaran {name}",
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=f"Example:\n  {subcommand.example}",
    )
    importlib.import_module(subcommand.module).add_arguments(parser)
    if not any("--config" in action.option_strings for action in parser._actions):
        parser.add_argument("--config", metavar="FILE", help="YAML file of `flag: value` lines")
    return parser


def _version() -> str:
    from importlib.metadata import version

    return version("trimaran")


def _overview() -> str:
    lines = ["usage: trimaran COMMAND [flags]", "", "LLM serving on MPI ranks.", ""]
    lines += [f"  {name:<14} {each.summary}" for name, each in SUBCOMMANDS.items()]
    lines += [
        "",
        "Example:",
        f"  {SUBCOMMANDS['serve'].example}",
        "",
        "Flags of a command: trimaran COMMAND --help",
    ]
    return "\n".join(lines)


class OutputError(TrimaranError):
    """The output of a command cannot be written."""


class ReaderGoneError(OutputError):
    """The reader of a command's output has closed its pipe (`trimaran ... | head`)."""


class _Watched:
    """A stream that keeps its first error, to distinguish it from errors of other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._recording_errors():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._recording_errors():
            self._stream.flush()

    @contextlib.contextmanager
    def _recording_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            raise


@contextlib.contextmanager
def watched_output() -> Iterator[None]:
    """Run a command; all that it printed is written when this ends.

    A failure that the command has handled is not raised again.

    Raises:
        OutputError: standard output cannot be written, for example on a full disk.
        ReaderGoneError: standard output is a pipe whose reader is gone.
    """
    stream = sys.stdout
    watched = _Watched(stream)
    sys.stdout = cast("TextIO", watched)
    try:
        try:
            yield
        except SystemExit:
            if watched.error is not None:  # argparse ignores an error in writing its help
                raise watched.error from None
            watched.flush()
            raise
        if watched.error is None:
            watched.flush()
    except OSError as error:
        if error is not watched.error:
            raise
        kind = ReaderGoneError if isinstance(error, BrokenPipeError) else OutputError
        raise kind(f"standard output cannot be written: {error.strerror}") from None
    finally:
        sys.stdout = stream
        _drop_the_rest(stream)


def _drop_the_rest(stream: TextIO) -> None:
    """Write the remaining output, or redirect it so that the interpreter's exit does not
    fail.
    """
    try:
        stream.flush()
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
