"""Three models under concurrent clients while their processes are killed and stopped at random.

    .venv/bin/python benchmarks/soak.py --minutes 30 --json benchmarks/results/soak.json

Every request must end with the greedy tokens of an undisturbed run, or with an error that
says to retry, within its deadline; requests of untouched models must not fail; and nothing
may be left over. Ends with 1 and says what was not so. Needs root on Linux, to give the
server a /dev/shm of its own (or --shared-shm, on a machine where nothing else is started).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "faults"), str(_TESTS / "e2e")]
# Last on the path: the folder holds folders with common names.
sys.path.append(str(_TESTS.parent))

from models import (  # noqa: E402
    FOUR_GPUS,
    GPU_IDS,
    LAYOUTS,
    THREE_MODELS,
    TWO_GPUS,
    build_repository,
)
from shm import PrivateShm, SharedShm  # noqa: E402
from soak_run import Soak  # noqa: E402


def main() -> int:
    """Run the soak, print the report, write it as JSON; 0 without problems."""
    args = _arguments()
    on_cpu = LAYOUTS if args.layouts else THREE_MODELS
    models = {0: on_cpu, 2: TWO_GPUS, 4: FOUR_GPUS}[args.gpus]
    if args.leader:
        models = models[:1]
    # Answers are compared bit by bit: float32 on the CPU, fixed orders on a GPU.
    exact = ("--deterministic",) if args.gpus else ("--dtype", "float32", "--num-threads", "1")
    folder = Path(tempfile.mkdtemp(prefix="trimaran-soak-"))
    soak = Soak(
        build_repository(folder, models, GPU_IDS.get(args.gpus)),
        models,
        folder,
        args.minutes,
        flags=(*exact, *args.flags),
        multi_model=not args.leader,
        num_clients=args.clients,
        deadline_s=args.deadline,
        seed=args.seed,
        kinds=tuple(args.faults.split(",")) if args.faults else (),
        pause_s=(args.pause / 4, args.pause),
        think_s=args.think,
        make_shm=SharedShm if args.shared_shm else PrivateShm,
    )
    report = {"command": " ".join(["benchmarks/soak.py", *sys.argv[1:]]), **soak.run()}
    text = json.dumps(report, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    if report["problems"]:
        print(f"soak: NOT as promised; the server's log: {folder}/serve.log", file=sys.stderr)
        return 1
    shutil.rmtree(folder)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=30.0, help="of load under chaos (%(default)g)")
    add("--clients", type=int, default=64, help="concurrent clients (%(default)s)")
    add("--deadline", type=float, default=180.0, help="of one request, seconds (%(default)g)")
    add("--pause", type=float, default=8.0, help="longest pause between faults (%(default)g s)")
    add("--think", type=float, default=0.5, help="mean pause of a client (%(default)g s)")
    add("--seed", type=int, default=1)
    add("--faults", default="", help="comma list of kinds (default: all)")
    add("--gpus", type=int, default=0, choices=(0, 2, 4), help="0: on the CPU (%(default)s)")
    add("--layouts", action="store_true", help="on the CPU: pipeline stages, and dp ranks")
    add("--leader", action="store_true", help="leader mode, with the first model alone")
    add("--shared-shm", action="store_true", help="use the machine's /dev/shm: needs no root")
    add("--json", type=Path, help="write the account there")
    add("flags", nargs="*", help="after --: further flags of trimaran serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
