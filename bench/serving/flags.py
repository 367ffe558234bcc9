"""The flags of the benchmarks of a server, named as in the TensorRT-LLM backend's benchmark."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Collection

from trimaran.bench.limits.shapes import SHAPES
from trimaran.client.request_flags import add_concurrency, add_protocol, hide
from trimaran.client.vocabulary import TYPES
from trimaran.comm.errors import ConfigError
from trimaran.comm.files.flag_values import positive

_EXAMPLE = "Example:\n  trimaran bench"


WORKLOADS = ("dataset", "token-norm-dist", "token-from-histogram")
"""Sub-commands that say what is sent. Underscores may stand for the hyphens."""

SubCommands = argparse._SubParsersAction  # argparse has no public name for this action


def add_arguments(parser: argparse.ArgumentParser) -> SubCommands[argparse.ArgumentParser]:
    """Add global flags, and return the sub-commands. Those of a workload take the global flags
    behind their names too, as the backend's benchmark does."""
    parser.add_argument("-u", "--url", metavar="HOST:PORT", help="default: by protocol")
    add_protocol(parser)
    parser.add_argument(
        "--tensorrt-llm-model-name", action="append", metavar="NAME",
        help="token-level model (default tensorrt_llm); repeat to take turns",
    )  # fmt: skip
    _add_load(parser)
    _add_lengths(parser)
    _add_results(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="print every error")
    parser.add_argument("-t", "--stream-timeout", type=float, metavar="S", help="gRPC streams")
    parser.add_argument("--decoupled", action="store_true", help="insist on a decoupled model")
    parser.add_argument(
        "--no-streaming", action="store_true", help="one response a request: no token times"
    )
    parser.add_argument(
        "--exclude-input-in-output", action="store_true", help="answers lack the prompt"
    )
    parser.add_argument("--test-llmapi", action="store_true", help="refused: not served yet")
    kinds = _add_subcommands(parser)
    for name in WORKLOADS:
        _copy_flags(kinds.choices[name], parser)
    parser.usage = "trimaran bench [flags] [dataset|token-norm-dist|token-from-histogram ...]"
    hide(
        parser, "verbose", "stream_timeout", "exclude_input_in_output", "test_llmapi",
        "time_delay_dist", "warmup", "seed", "op_stats_csv", "dump_perfetto_trace",
        "check_perf_json", "check_perf_key", "check_perf_atol", "check_perf_rtol",
    )  # fmt: skip
    return kinds


def refuse_given(
    args: argparse.Namespace, where: str, *, names: Collection[str] = (), but: str = ""
) -> None:
    """Refuse flags of the plain benchmark that have no effect here: the flags ``names``, or all
    flags except ``but``.

    Raises:
        ConfigError: names the flag, and the place ``where`` the flag has no effect.
    """
    plain = argparse.ArgumentParser()
    add_arguments(plain)
    for action in plain._actions:
        if action.dest not in (names or vars(args)) or action.dest == but:
            continue
        if action.option_strings and getattr(args, action.dest) != action.default:
            flag = action.option_strings[-1]
            raise ConfigError(f"{flag} has no effect on {where}. Leave it out.")


def _add_load(parser: argparse.ArgumentParser) -> None:
    add_concurrency(parser)
    parser.add_argument(
        "--num-requests", type=int, metavar="N",
        help="default: 30000 at most with a sub-command, else 10 for each connection",
    )  # fmt: skip
    parser.add_argument(
        "--request-rate", type=float, default=-1, metavar="R", help="a second; -1: unpaced (-1)"
    )
    parser.add_argument(
        "--time-delay-dist", choices=("exponential_dist", "constant"),
        default="exponential_dist", help="gaps between paced requests (exponential_dist)",
    )  # fmt: skip
    parser.add_argument(
        "--load-processes", type=int, default=1, metavar="N",
        help="send from N processes: one reads some thousand tokens a second (1)",
    )  # fmt: skip
    parser.add_argument(
        "--warmup", type=int, default=10, metavar="N", help="requests before (10)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=420,
        metavar="N",
        help="of prompts, lengths and gaps (420)",
    )


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, metavar="N", help="random prompts of N tokens")
    parser.add_argument("--output-len", type=int, metavar="N", help="tokens to generate")
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=1000,
        metavar="N",
        help="random ids are below N (1000)",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T",
        help="sample at T over the whole vocabulary (greedy)",
    )  # fmt: skip
    parser.add_argument(
        "--max-input-len", type=int, metavar="N", help="drop prompts that are longer"
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", metavar="FILE", help="write figures, versions and machine")
    parser.add_argument(
        "--metrics-url", metavar="URL", help="record the engine's own facts from here in --json"
    )
    parser.add_argument("--op-stats-csv", metavar="FILE", help="write the table")
    parser.add_argument(
        "--dump-perfetto-trace", metavar="FILE", nargs="?", const="perfetto_trace.json",
        help="write every request as a span",
    )  # fmt: skip
    parser.add_argument(
        "--check-perf-json", metavar="FILE", help="JSON object of total latencies in ms"
    )
    parser.add_argument("--check-perf-key", metavar="KEY", help="fail if slower than this one")
    parser.add_argument(
        "--check-perf-atol",
        type=float,
        default=50,
        metavar="MS",
        help="slowdown that passes (50)",
    )
    parser.add_argument(
        "--check-perf-rtol",
        type=float,
        default=0.05,
        metavar="RATE",
        help="relative slowdown that passes in addition (0.05)",
    )


def _add_subcommands(
    parser: argparse.ArgumentParser,
) -> SubCommands[argparse.ArgumentParser]:
    kinds = parser.add_subparsers(dest="workload", metavar="dataset|token-norm-dist|...")
    dataset = kinds.add_parser(
        "dataset",
        help="prompts of a JSON file",
        description="Measure with the prompts of a JSON file.",
        epilog=f"{_EXAMPLE} --max-input-len 512 dataset --dataset d.json --tokenizer-dir llama",
    )
    dataset.add_argument(
        "--dataset", required=True, metavar="FILE",
        help="JSON list of objects with input, instruction and output",
    )  # fmt: skip
    dataset.add_argument(
        "--tokenizer-dir", required=True, metavar="DIR", help="tokenizer folder"
    )
    dataset.add_argument(
        "--tokenizer-type", default="auto", choices=TYPES, help="all read alike"
    )
    dataset.add_argument(
        "--op-tokens-per-word", type=float, default=1.3, metavar="R",
        help="tokens to ask for a word of the expected output (1.3)",
    )  # fmt: skip
    normal = kinds.add_parser(
        "token-norm-dist",
        aliases=["token_norm_dist"],
        help="normally distributed lengths",
        description="Measure with random prompts of normally distributed lengths.",
        epilog=f"{_EXAMPLE} token-norm-dist --input-mean 128 --input-stdev 10 "
        "--output-mean 64 --output-stdev 5",
    )
    for name in ("--input-mean", "--input-stdev", "--output-mean", "--output-stdev"):
        normal.add_argument(name, type=float, required=True, metavar="N", help="tokens")
    histogram = kinds.add_parser(
        "token-from-histogram",
        aliases=["token_from_histogram"],
        help="lengths of a built-in table",
        description="Measure with random prompts whose lengths follow a built-in table.",
        epilog=f"{_EXAMPLE} token-from-histogram --histogram-key example",
    )
    histogram.add_argument(
        "--histogram-key", required=True, metavar="KEY", help="the table: example"
    )
    return kinds


_NOT_COPIED = ("help", "config", "workload")


def add_flags(parser: argparse.ArgumentParser, plain: argparse.ArgumentParser) -> None:
    """All flags of ``plain``, which may also stand before the sub-command, and our own."""
    _copy_flags(parser, plain)
    add = parser.add_argument
    add("--load", action="append", metavar="ISL/OSLxN", help="N random prompts; repeat")
    add("--rates", type=float, nargs="+", metavar="R", help="arrivals a second; -1: at once")
    add("--concurrencies", type=positive, nargs="+", metavar="N", help="requests in flight")
    add(
        "--runs",
        type=positive,
        default=1,
        metavar="N",
        help="of each point; the median is reported (1)",
    )
    add("--gpus", type=positive, default=1, metavar="N", help="of the server (default 1)")
    add("--shape", choices=sorted(SHAPES), help="of the served model, for the limit")
    add("--ceilings-of", metavar="FILE", help="machine's ceilings: a `throughput --output`")
    add("--output", metavar="FILE", help="append results as JSON lines")


def _copy_flags(parser: argparse.ArgumentParser, plain: argparse.ArgumentParser) -> None:
    for action in plain._actions:
        if action.option_strings and action.dest not in _NOT_COPIED:
            own = copy.copy(action)
            # A value before the sub-command applies unless the flag is repeated.
            own.default = argparse.SUPPRESS
            parser._add_action(own)
