"""Freed blocks of megabytes return to the system, regardless of earlier frees."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import psutil
from trimaran.server.memory import return_large_blocks

return_large_blocks()
# Otherwise glibc keeps blocks of up to 30 MB from now on: all that follows, 105 MB.
block = bytearray(30 << 20)
del block
before = psutil.Process().memory_info().rss
blocks, small = [], []
for _ in range(25):
    blocks.append(bytearray(b"x") * (4 << 20))
    # What lies behind a block in a heap keeps it there.
    small.append(bytearray(2000))
del blocks
print(psutil.Process().memory_info().rss - before)
"""


def test_large_freed_blocks_return_to_the_operating_system():
    kept = int(subprocess.check_output([sys.executable, "-c", _PROGRAM]))
    assert kept < 10 << 20
