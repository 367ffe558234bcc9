"""Fuzzes a server: ``python tests/faults/fuzz/run.py --seconds 300 --seed 1``.

Starts a server of the demo model on two ranks, or uses a running server, and sends random
requests over HTTP and gRPC beside a greedy stream and a health probe. The exit code is 1 after
an effect on other clients: a gap of more than a second, another text, 200 MB more memory, a
lost stream, probe or front end, or an internal error of the server. The requests of that time
are saved as a file, which ``--replay FILE`` sends again.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FAULTS = Path(__file__).resolve().parents[1]
_ROOT = _FAULTS.parents[1]
for _folder in (_ROOT, _FAULTS.parent / "e2e", _FAULTS, _FAULTS / "fuzz"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

from campaign import Campaign, Target, case_of  # noqa: E402
from cases import corpus, write  # noqa: E402
from forms import FORMS, VALUES, Access, flags_of  # noqa: E402
from sending import Ports  # noqa: E402
from served import DEMO_MODEL, Served, init_repo, run_trimaran  # noqa: E402

from trimaran.bench.serving.free_ports import free_ports  # noqa: E402

NUM_RANKS = 2
CHAT_TEMPLATE = """{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"""


@dataclass
class FuzzServed(Served):
    """A server that clients reach in a certain way."""

    access: Access = field(default_factory=Access)
    openai_port: int = 0

    def start(self) -> None:
        """Start the supervisor, with an OpenAI port too."""
        (self.openai_port,) = free_ports(1)
        self.flags += ("--openai-port", str(self.openai_port))
        super().start()

    def is_ready(self) -> bool:
        """Whether /v2/health/ready answers 200 now."""
        with contextlib.closing(self.access.connection(self.http_port, 5)) as connection:
            try:
                connection.request("GET", "/v2/health/ready", headers=self.access.headers)
                return connection.getresponse().status == 200
            except (OSError, http.client.HTTPException):
                return False


@contextlib.contextmanager
def demo_server(
    folder: Path, flags: tuple[str, ...] = (), forms: Iterable[str] = ()
) -> Iterator[FuzzServed]:
    """The demo model on two ranks, as `make serve` serves it, with guided decoding."""
    engine = folder / "engine"
    done = run_trimaran(
        "build", "--checkpoint", str(DEMO_MODEL), "--output", str(engine), "--tp-size",
        str(NUM_RANKS), "--max-batch-size", "64", "--max-input-len", "896",
        "--max-num-tokens", "1024",
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(done.stderr)
    values = {
        "tokenizer_dir": str(DEMO_MODEL), "engine_dir": str(engine), "decoupled_mode": "True",
        "guided_decoding_backend": "xgrammar",
    }  # fmt: skip
    for form in forms:
        values |= VALUES.get(form, {})
    fill = ",".join(f"{key}:{value}" for key, value in values.items())
    init_repo(str(folder / "models"), "--defaults", "--fill", fill)
    template = folder / "chat.jinja"
    template.write_text(CHAT_TEMPLATE)
    flags += ("--chat-template", str(template), "--tool-call-parser", "kimi_k3")
    log = folder / "serve.log"
    fields: dict[str, Any] = {}
    for form in forms:
        more_flags, more_fields = flags_of(form, folder)
        flags += more_flags
        fields |= more_fields
    access = Access(**fields)
    with FuzzServed(folder / "models", NUM_RANKS, flags, log, access=access) as served:
        yield served


def target_of(served: FuzzServed) -> Target:
    """The interface of a server for the campaign."""
    ports = Ports(
        served.http_port, served.grpc_port, served.metrics_port, served.access,
        served.openai_port,
    )  # fmt: skip
    return Target(ports, served.process.pid, served.log)


def main() -> int:
    """Run the command; its exit code."""
    options = _options()
    if options.list:
        for number in range(*options.list):
            print(number, json.dumps(case_of(options.seed, number).to_dict())[:1000])
        return 0
    if options.cpus:
        # The server, the clients and the watch share them.
        os.sched_setaffinity(0, {int(each) for each in options.cpus.split(",")})
    options.save.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if options.pid:
            http_port, grpc_port, metrics_port, openai_port = (*options.ports, 0)[:4]
            ports = Ports(http_port, grpc_port, metrics_port, openai=openai_port)
            target = Target(ports, options.pid)
        else:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-")))
            flags = tuple(options.serve_flags.split())
            served = stack.enter_context(demo_server(folder, flags, options.form))
            target = target_of(served)
        campaign = Campaign(target, options.save, options.seed, options.clients)
        _run(campaign, options)
        campaign.check_log()
        if campaign.violations and not options.pid:
            log = options.save / f"serve-{options.seed}.log"
            log.write_text(target.log())
    report = campaign.report()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    del report["samples"]
    print(json.dumps(report, indent=1), flush=True)
    return 1 if campaign.violations else 0


def _run(campaign: Campaign, options: argparse.Namespace) -> None:
    if options.replay:
        campaign.replay(options.replay, options.times)
    elif options.corpus:
        campaign.replay(corpus(), options.times)
    elif options.numbers:
        numbers = [int(each) for each in options.numbers.split(",")]
        for number in numbers:
            path = options.save / f"case-{options.seed}-{number}.json"
            write(path, [case_of(options.seed, number)])
        campaign.run(0.0, numbers * options.times)
    else:
        campaign.run(options.seconds)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Raw)
    add = parser.add_argument
    add("--seconds", type=float, default=300.0, help="how long random cases are sent")
    add("--seed", type=int, default=1, help="which cases")
    add("--clients", type=int, default=4, help="cases under way at a time")
    add("--cpus", default="", help="run all on these cores, such as 0,1")
    add("--save", type=Path, default=Path("fuzz-found"), help="folder for what did harm")
    add("--json", type=Path, help="write the report to this file too")
    add("--serve-flags", default="", help="flags of the server that is started")
    add("--form", choices=FORMS, action="append", default=[],
        help="serve with TLS, with API keys and restricted APIs, with two front ends, or with "
        "drafts; several may be given")  # fmt: skip
    add("--pid", type=int, default=0, help="the process of a `trimaran serve` that runs")
    add("--ports", type=int, nargs="+", metavar="PORT",
        help="its HTTP, gRPC and metrics ports, and the OpenAI port if it has one")  # fmt: skip
    add("--replay", type=Path, nargs="+", metavar="FILE", help="send the cases of files")
    add("--corpus", action="store_true", help="send the committed corpus")
    add("--numbers", default="", help="send the cases of these numbers, such as 7,8")
    add("--times", type=int, default=1, help="how often --replay, --corpus or --numbers send")
    add("--list", type=int, nargs=2, metavar="NUMBER", help="print the cases of a range")
    return parser.parse_args()


class _Raw(argparse.RawDescriptionHelpFormatter):
    """Keeps the paragraphs of the description."""


if __name__ == "__main__":
    # The signal of Ctrl-C, so that the server ends too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
