"""A starter of ranks with mpirun's ways: the first death is its exit code and ends all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time


def main() -> None:
    if os.environ.pop("TEST_HELPER", ""):
        # Like an mpirun whose ranks are children of an unsupervised helper.
        subprocess.run([sys.executable, "-P", *sys.argv])
        time.sleep(600)
    at = sys.argv.index("-n")
    size, command = int(sys.argv[at + 1]), sys.argv[at + 2 :]
    told_size = int(os.environ.get("TEST_TOLD_SIZE", str(size)))
    ranks = []
    for rank in range(size):
        env = {**os.environ, "TEST_RANK": str(rank % told_size), "TEST_SIZE": str(told_size)}
        ranks.append(subprocess.Popen(command, env=env, preexec_fn=os.setpgrp))
    while True:
        codes = [rank.poll() for rank in ranks]
        bad = [code for code in codes if code]
        if bad:
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
            sys.exit(128 - bad[0] if bad[0] < 0 else bad[0])
        if all(code == 0 for code in codes):
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
