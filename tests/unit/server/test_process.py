"""The front end as a process."""

import subprocess
import sys


def test_the_front_end_never_imports_torch():
    code = "import sys, trimaran.server.main; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
