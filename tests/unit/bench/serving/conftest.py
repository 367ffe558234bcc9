"""Scripted servers under the benchmark's command line, as the client's tests have them."""

import sys
from pathlib import Path

from tests.unit.client.conftest import http_server, repo_root, server, trimaran

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["http_server", "repo_root", "server", "trimaran"]
