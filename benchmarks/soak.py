"""Three models under concurrent clients while their processes are killed and stopped at random.

    .venv/bin/python benchmarks/soak.py --minutes 30 --json benchmarks/results/soak.json

Every request must end with the greedy tokens of an undisturbed run, or with an error that
says to retry, within its deadline; requests of untouched models must not fail; and nothing
may be left over. Ends with 1 and says what was not so. Needs root on Linux.
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

from models import THREE_MODELS, build_repository  # noqa: E402
from soak_run import Soak  # noqa: E402


def main() -> int:
    """Run the soak, print its account, write it as JSON; 0 if nothing was wrong."""
    args = _arguments()
    names = args.models.split(",") if args.models else [m.name for m in THREE_MODELS]
    models = tuple(model for model in THREE_MODELS if model.name in names)
    gpus = dict(zip(names, args.gpus.split(":"), strict=True)) if args.gpus else None
    folder = Path(tempfile.mkdtemp(prefix="trimaran-soak-"))
    soak = Soak(
        build_repository(folder, models, gpus),
        models,
        folder,
        args.minutes,
        flags=tuple(args.flags),
        multi_model=not args.leader,
        num_clients=args.clients,
        deadline_s=args.deadline,
        seed=args.seed,
        kinds=tuple(args.faults.split(",")) if args.faults else (),
        pause_s=(args.pause / 4, args.pause),
        think_s=args.think,
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
    add("--deadline", type=float, default=120.0, help="of one request, seconds (%(default)g)")
    add("--pause", type=float, default=8.0, help="longest pause between faults (%(default)g s)")
    add("--think", type=float, default=0.5, help="mean pause of a client (%(default)g s)")
    add("--seed", type=int, default=1)
    add("--models", default="", help="comma list (default: all three)")
    add("--faults", default="", help="comma list of kinds (default: all)")
    add("--gpus", default="", help="gpu_device_ids of each model, colons between models")
    add("--leader", action="store_true", help="leader mode, with one of the models")
    add("--json", type=Path, help="write the account there")
    add("flags", nargs="*", help="after --: further flags of trimaran serve")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
