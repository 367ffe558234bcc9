"""Headers of clients that the operator's pattern makes parameters of requests."""

import numpy as np
import pytest
import tritonclient.grpc as grpc
import tritonclient.http as http
from tritonclient.utils import InferenceServerException

from tests.unit.server.conftest import RunningServer
from trimaran.comm.errors import ConfigError, RequestError
from trimaran.server.inference.forwarded_headers import MAX_NAME, HeaderForwarding
from trimaran.server.inference.request import InferRequest

EMPTY = np.empty(0, np.float32)


def forwarded(pattern, *headers):
    request = InferRequest(model_name="m", parameters={"own": "1"})
    HeaderForwarding("--flag", pattern).apply(request, headers)
    return request.parameters


def test_names_match_anywhere_and_without_case_and_stay_as_they_came():
    headers = (b"X-Tenant", b"a"), ("y-TENANT-z", "b"), (b"other", b"c")
    assert forwarded("tenant", *headers) == {"own": "1", "X-Tenant": "a", "y-TENANT-z": "b"}
    assert forwarded("(?-i)Tenant", *headers) == {"own": "1", "X-Tenant": "a"}
    assert forwarded("", *headers) == {"own": "1"}


def test_reserved_names_are_refused_where_they_match():
    for name in (b"Timeout", b"triton_enable_empty_final_response", "sequence_id"):
        with pytest.raises(RequestError, match="name of a reserved parameter"):
            forwarded(".*", (name, b"1"))
    assert forwarded("^x-", (b"timeout", b"1")) == {"own": "1"}


def test_a_long_name_matches_nothing():
    longest = "x" * MAX_NAME
    assert forwarded("x", (longest, "1"), (longest + "x", "1")) == {"own": "1", longest: "1"}


def test_no_name_holds_up_the_event_loop_whatever_the_pattern_is():
    """A backtracking match would not end."""
    names = [("x" * (MAX_NAME - 4) + str(number), "1") for number in range(100, 164)]
    assert forwarded("(x+x+)+y", *names) == {"own": "1"}


def test_a_pattern_that_is_none_is_the_operators_error():
    with pytest.raises(ConfigError, match=r"--flag is '\(', which is no regular expression"):
        HeaderForwarding("--flag", "(")
    with pytest.raises(ConfigError, match="write it without lookaround"):
        HeaderForwarding("--flag", "x-(?=tenant)")


def test_both_wires_refuse_a_forwarded_reserved_name():
    running = RunningServer(
        http_header_forward_pattern="^priority", grpc_header_forward_pattern="^priority"
    )
    try:
        for module, url in ((http, running.http_url), (grpc, running.grpc_url)):
            client = module.InferenceServerClient(url)
            tensor = module.InferInput("FP32", [0], "FP32")
            tensor.set_data_from_numpy(EMPTY)
            client.infer("echo", [tensor])
            with pytest.raises(InferenceServerException, match="reserved parameter"):
                client.infer("echo", [tensor], headers={"priority": "1"})
            client.close()
    finally:
        running.close()
