"""The generate routes as clients see them."""

import contextlib
import email.utils
import http.client
import json
import socket
import time

import pytest

GENERATE = "/v2/models/repeat/generate"
STREAM = "/v2/models/repeat/generate_stream"


def test_a_response_of_generate_is_a_flat_object_with_ordered_keys(server):
    answer = server.post(GENERATE, {"text_input": "hi", "max_tokens": 1, "id": "r1"})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.body == (
        b'{"id":"r1","model_name":"repeat","model_version":"1","output_ids":0,'
        b'"text_output":"hi 0"}'
    )


def test_a_stream_is_one_event_a_response_and_then_ends(server):
    answer = server.post(STREAM, {"text_input": "hi", "max_tokens": 3, "stream": True})
    assert answer.status == 200
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["Transfer-Encoding"] == "chunked"
    assert [event["text_output"] for event in answer.events] == ["hi 0", "hi 1", "hi 2"]


def test_a_stream_of_no_responses_is_empty(server):
    answer = server.post(STREAM, {"text_input": "hi", "max_tokens": 0})
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize("count", [0, 2])
def test_generate_needs_exactly_one_response(server, count):
    answer = server.post(GENERATE, {"text_input": "hi", "max_tokens": count})
    assert answer.status == 200
    assert answer.error == (
        "generate expects model to produce exactly 1 response, use generate stream for model "
        "that generates various number of responses"
    )


def test_the_first_responses_error_is_the_status(server):
    answer = server.post(GENERATE, {"text_input": "hi", "max_tokens": 2, "fail_at": 0})
    assert (answer.status, answer.error) == (500, "boom")


def test_the_first_responses_error_is_the_status_and_the_only_event_of_a_stream(server):
    answer = server.post(STREAM, {"text_input": "hi", "max_tokens": 2, "fail_at": 0})
    assert answer.status == 500
    assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
    assert answer.events == [{"error": "boom"}]


def test_an_error_before_the_inference_is_json_on_a_stream_too(server):
    answer = server.post(STREAM, {"text_input": "hi", "max_tokens": "two"})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.error


def test_a_later_error_is_an_event_under_status_200(server):
    answer = server.post(STREAM, {"text_input": "hi", "max_tokens": 2, "fail_at": 1})
    assert answer.status == 200
    assert answer.events[1:] == [{"error": "boom"}]


def test_a_bug_within_a_stream_is_an_event_and_the_connection_stays_open(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.http_port, timeout=60)
    for _ in range(2):
        body = json.dumps({"text_input": "hi", "max_tokens": 3, "crash_at": 1})
        connection.request("POST", STREAM, body)
        *_, last, rest = connection.getresponse().read().split(b"\n\n")
        assert json.loads(last[6:])["error"].startswith("internal error")
        assert rest == b""
    connection.close()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a":"\\ud800"}', "The surrogate pair in string is invalid. at 6"),
        (b'{"a":"\\udc80"}', "The surrogate pair in string is invalid. at 6"),
        (b'{"a":"\\ud83d \\ude00"}', "The surrogate pair in string is invalid. at 6"),
        (b'{"a":"\\ud83d\\ud83d\\ude00"}', "The surrogate pair in string is invalid. at 6"),
        (b'{"a":"\\ud83d\\ude00\\ude00"}', "The surrogate pair in string is invalid. at 18"),
        (b'{"a":"\\\\\\ud83d"}', "The surrogate pair in string is invalid. at 8"),
        (b'{"a":%b}' % (b"1" * 5000), "Number too big to be stored in double. at 0"),
    ],
)
def test_json_without_a_valid_meaning_is_refused(server, body, reason):
    answer = server.post(GENERATE, body)
    assert answer.status == 500
    assert answer.error == f"failed to parse the request JSON buffer: {reason}"


def test_escaped_characters_outside_the_basic_plane_are_decoded(server):
    body = b'{"text_input":"\\ud83d\\ude00 \\\\ud800","max_tokens":1}'
    assert server.post(GENERATE, body).json["text_output"] == "\U0001f600 \\ud800 0"


def test_many_duplicate_keys_take_no_more_time_than_unique_keys(server):
    body = ",".join(f'"k{n}":1,"k{n}":2' for n in range(100_000))
    started = time.monotonic()
    assert server.post(GENERATE, b"{%b}" % body.encode()).status == 400
    assert time.monotonic() - started < 30


def test_generated_text_is_streamed_unchanged(server):
    text = 'quote " backslash \\ tab \t line \n nul \u0000 ü 字 😀'
    answer = server.post(GENERATE, {"text_input": text, "max_tokens": 1})
    assert answer.json["text_output"] == text + " 0"
    assert "字".encode() in answer.body


def test_a_scalar_is_a_batch_of_one_and_a_list_is_a_batch(server):
    document = {"inputs": [], "X": [1, 2, 3, 4]}
    answer = server.post("/v2/models/double/generate", {"X": [1, 2, 3, 4]})
    assert answer.json["Y"] == [2, 4, 6, 8]
    assert server.post("/v2/models/double/generate", document).status == 400


def test_an_empty_string_stands_for_no_words(server):
    body = {"text_input": "a", "max_tokens": 1, "bad_words": ""}
    assert server.post(GENERATE, body).status == 200


def test_several_words_are_one_row(server):
    body = {"text_input": "a", "max_tokens": 1, "bad_words": ["x", "y"]}
    assert server.post(GENERATE, body).status == 200


def test_unknown_keys_are_parameters_and_so_is_the_id(server):
    body = {"id": "7", "TEXT": "t", "temperature": 0.5, "parameters": {"k": True}}
    answer = server.post("/v2/models/echo/generate", body)
    assert answer.json == {
        "OUT_TEXT": "t", "id": "7", "k": True, "model_name": "echo", "model_version": "1",
        "temperature": 0.5,
    }  # fmt: skip


def test_members_of_parameters_may_be_inputs(server):
    body = {"parameters": {"text_input": "a", "max_tokens": 1}}
    assert server.post(GENERATE, body).json["text_output"] == "a 0"


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (b"{", 500, "failed to parse the request JSON buffer: Missing a name for object "
         "member. at 1"),
        (b"[1]", 500, "attempt to get members for non-object"),
        ({"id": 1}, 500, "Unable to parse 'id': attempt to access JSON non-string as string"),
        (
            {"parameters": 1},
            500,
            "Expected JSON object for keyword: 'parameters': attempt to access JSON non-object "
            "as object",
        ),
        (
            {"parameters": {"x": []}},
            400,
            "Converting keyword: 'parameters': parameter 'x' has invalid type. It should be "
            "either 'int', 'bool', or 'string'.",
        ),
        (
            {"foo": None},
            400,
            "parameter 'foo' has invalid type. It should be either 'int', 'bool', or 'string'.",
        ),
        (
            {"text_input": "a", "max_tokens": "3"},
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as "
            "signed-integer",
        ),
        (
            {"text_input": "a", "max_tokens": 3.7},
            500,
            "Unable to parse 'data': attempt to access JSON non-signed-integer as "
            "signed-integer",
        ),
        (
            {"text_input": 5, "max_tokens": 3},
            500,
            "Unable to parse JSON bytes array: attempt to access JSON non-string as string",
        ),
        (
            {"text_input": "a", "max_tokens": 1, "stream": 1},
            500,
            "Unable to parse 'data': attempt to access JSON non-boolean as boolean",
        ),
        (
            {"text_input": "a"},
            400,
            "[request id: <id_unknown>] expected number of inputs between 2 and 7 but got 1 "
            "inputs for model 'repeat'. Got input(s) ['text_input'], but missing required "
            "input(s) ['max_tokens']. Please provide all required input(s).",
        ),
        (
            b'{"text_input":"a","max_tokens":1,"text_input":"b"}',
            400,
            "[request id: <id_unknown>] input 'text_input' already exists in request",
        ),
        (
            {"text_input": "a", "max_tokens": []},
            400,
            "[request id: <id_unknown>] input 'max_tokens' has no shape but model requires "
            "batch dimension for 'repeat'",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", [GENERATE, STREAM])
def test_a_wrong_body_is_refused_before_anything_runs(server, path, body, status, text):
    answer = server.post(path, body)
    assert (answer.error, answer.status) == (text, status)


def test_a_number_of_values_that_fits_no_shape_is_refused(server):
    answer = server.post("/v2/models/double/generate", {"X": [1, 2, 3]})
    assert (answer.status, answer.error) == (
        400, "The schema can not convert input 'X' to tensor with proper shape",
    )  # fmt: skip


def test_an_output_without_json_form_is_an_error(server):
    assert server.post("/v2/models/echo/generate", {"FP16": 1.0}).status == 400


def test_compressed_bodies_are_refused(server):
    answer = server.post(GENERATE, b"x", {"Content-Encoding": "gzip"})
    assert (answer.status, answer.error) == (
        400, "Unsupported content-encoding, only 'identity' is supported.",
    )  # fmt: skip


def test_the_endpoint_load_header_is_sent_if_requested_and_known(fresh_server):
    body = {"text_input": "a", "max_tokens": 1}

    def header(style):
        answer = fresh_server.post(GENERATE, body, {"endpoint-load-metrics-format": style})
        return answer.headers["endpoint-load-metrics"]

    assert header("text") is None
    stats = {"kv_max_blocks": 100, "kv_used_blocks": 25, "kv_tokens_per_block": 32}
    fresh_server.metrics.set_engine_stats("tensorrt_llm", "1", stats)
    assert header("text") == (
        "TEXT named_metrics.kv_cache_utilization=0.250000, "
        "named_metrics.max_token_capacity=3200"
    )
    assert header("json") == (
        'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":3200}}'
    )
    assert header("xml") is None
    other = {"kv_max_blocks": 300, "kv_used_blocks": 15, "kv_tokens_per_block": 16}
    fresh_server.metrics.set_engine_stats("other", "1", other)
    assert header("text") == (
        "TEXT named_metrics.kv_cache_utilization=0.100000, "
        "named_metrics.max_token_capacity=8000"
    )


def _exchange(server, version, *lines):
    """The heads and bodies of two requests on one connection, and whether it then ends."""
    body = b'{"text_input": "hi", "max_tokens": 1}'
    head = [
        f"POST {GENERATE} HTTP/{version}",
        "Host: x",
        f"Content-Length: {len(body)}",
        *lines,
    ]
    found = []
    with socket.create_connection(("127.0.0.1", server.http_port), timeout=60) as sock:
        reader = sock.makefile("rb")
        for _ in range(2):
            status = b""
            # A request that meets a closed connection resets the connection.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall("\r\n".join((*head, "", "")).encode() + body)
                status = reader.readline()
            if not status:
                return found, True
            headers = http.client.parse_headers(reader)
            found.append((status, headers, reader.read(int(headers["Content-Length"]))))
    return found, False


def test_a_short_answer_has_the_head_of_other_answers(server):
    # The metadata of the server are sent by the HTTP library itself.
    answer, other = (
        server.post(GENERATE, {"text_input": "hi", "max_tokens": 1}),
        server.get("/v2"),
    )
    assert sorted(answer.headers) == sorted(other.headers)
    for name in ("Content-Type", "Server"):
        assert answer.headers[name] == other.headers[name]
    assert email.utils.parsedate_to_datetime(answer.headers["Date"]).tzinfo is not None
    assert int(answer.headers["Content-Length"]) == len(answer.body)


@pytest.mark.parametrize(
    ("version", "lines", "connection", "is_closed"),
    [
        ("1.1", (), None, False),
        ("1.1", ("Connection: close",), "close", True),
        ("1.0", (), None, True),
        ("1.0", ("Connection: keep-alive",), "keep-alive", False),
    ],
)
def test_a_short_answer_keeps_the_connection_as_its_request_asks(
    server, version, lines, connection, is_closed
):
    answers, ended = _exchange(server, version, *lines)
    assert (ended, len(answers)) == (is_closed, 1 if is_closed else 2)
    for status, headers, body in answers:
        assert status.startswith(f"HTTP/{version} 200".encode())
        assert headers["Connection"] == connection
        assert json.loads(body)["text_output"] == "hi 0"
