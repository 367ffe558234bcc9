"""The process that decodes long bodies."""

from __future__ import annotations

import json
import os
from multiprocessing import reduction
from pathlib import Path

from trimaran.server.decoding.process import __name__ as MODULE
from trimaran.server.decoding.tasks import LoadJsonTask
from trimaran.server.inference.helper_process import HelperProcess
from trimaran.server.protocol.load_request import LoadRequest


def test_the_process_decodes_without_the_grpc_library():
    body = json.dumps({"parameters": {}}).encode()
    file = os.memfd_create("body")
    os.write(file, body)
    helper = HelperProcess(MODULE)
    try:
        helper.connection.send((LoadJsonTask("model", 1 << 20), len(body)))
        reduction.send_handle(helper.connection, file, helper.pid)
        assert isinstance(helper.connection.recv(), LoadRequest)
        libraries = Path(f"/proc/{helper.pid}/maps").read_text()
    finally:
        os.close(file)
        helper.kill()
        helper.reap()
    # Messages are there: the test would pass without them too.
    assert "google/_upb" in libraries
    assert "cygrpc" not in libraries
