"""The folder of logs is looked at before anything starts."""

import os
import subprocess
import sys
from pathlib import Path

from launcher_repository import write_model

BASE = Path(__file__).resolve().parents[4] / "examples" / "demo_models" / "base"


def test_a_log_folder_that_cannot_be_written_is_refused(tmp_path):
    repository = tmp_path / "repo"
    write_model(repository / "tensorrt_llm", gpt_model_path=str(BASE))
    logs = tmp_path / "logs"
    logs.mkdir(mode=0o555)
    # Root may write everywhere until it drops this capability.
    as_owner = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    serve = [Path(sys.executable).with_name("trimaran"), "serve"]
    done = subprocess.run(
        [*(as_owner if os.geteuid() == 0 else ()), *serve,
         "--model-repo", str(repository), "--log-dir", str(logs)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.stderr == (
        f"trimaran: error: --log-dir {logs} cannot be written. Name another folder.\n"
    )
    assert done.returncode == 2
