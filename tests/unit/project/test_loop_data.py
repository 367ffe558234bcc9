"""Every place of the front end whose work is proportional to data that may come from a client.

The event loop serves all clients: no client's data may hold the loop for long. Calls that
convert, copy or search whole texts, arrays and messages stand in the table below alone, each
with the limit that bounds the work. A new call fails the test until the table names the bound
of the data. The test finds names of functions, but no loops of Python over data.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

_SPEC = importlib.util.spec_from_file_location("rules", Path(__file__).with_name("rules.py"))
assert _SPEC is not None and _SPEC.loader is not None
rules = sys.modules.get("rules") or importlib.util.module_from_spec(_SPEC)
if "rules" not in sys.modules:
    sys.modules["rules"] = rules
    _SPEC.loader.exec_module(rules)

ROOMS = (
    "access", "decoding", "direct", "engines", "grpc", "http", "inference", "models",
    "openai", "protocol", "python_models", "service.py", "shared_memory",
)  # fmt: skip
"""The parts of ``server`` that clients' data passes. The other parts read an operator's files,
and messages of the server's own processes."""

CALLS = frozenset((
    # JSON and protobuf
    "loads", "dumps", "FromString", "ParseFromString", "MergeFromString", "SerializeToString",
    "MessageToJson", "MessageToDict", "Parse", "ParseDict",
    # arrays
    "frombuffer", "tolist", "tobytes",
    # texts, and the tokenizer
    "encode", "decode", "join", "encode_batch", "encode_batch_fast", "decode_batch",
    "match", "search", "fullmatch", "finditer", "findall", "sub",
    # codings, and messages of processes
    "compress", "decompress", "b64encode", "b64decode", "recv", "recv_bytes", "packb",
    "unpackb",
))  # fmt: skip
JSON_CALLS = ("parse", "dump")
"""Of `protocol.json_access`, as other modules call them."""


@dataclass(frozen=True)
class Limit:
    """A number of the code that the table claims."""

    name: str
    value: int

    @property
    def current(self) -> object:
        """The number in the code."""
        module, _, name = f"trimaran.server.{self.name}".rpartition(".")
        return getattr(importlib.import_module(module), name)


KIB, MIB = 1 << 10, 1 << 20

SHORT = Limit("decoding.body.SHORT_BYTES", 256 * KIB)
SMALL_BODY = Limit("http.messages.SMALL_BODY_BYTES", 64 * KIB)
SMALL_MESSAGE = Limit("grpc.server.SMALL_MESSAGE_BYTES", 64 * KIB)
HEAD = Limit("http.connections.MAX_HEAD_BYTES", 256 * KIB)
NAME = Limit("protocol.limits.MAX_NAME_BYTES", 4 * KIB)
ITEMS = Limit("inference.cooperative.CHUNK_ITEMS", 1024)
BYTES = Limit("inference.cooperative.CHUNK_BYTES", MIB)
STATUS = Limit("grpc.status._MAX_STATUS_BYTES", 6 * KIB)
KEY = Limit("access.api_keys._MAX_SHOWN", 4 * KIB)
CONFIG = Limit("protocol.load_request._MAX_CONFIG_BYTES", MIB)
ANSWER = Limit("http.messages.LONG_ANSWER_BYTES", 128 * KIB)
INLINE_BODY = Limit("openai.endpoint.INLINE_BODY_BYTES", 16 * KIB)
INLINE_TEXT = Limit("models.tokenizer._INLINE_CHARACTERS", 2048)
INLINE_IDS = Limit("models.tokenizer.INLINE_IDS", 1024)
WORD_IDS = Limit("inference.text_limits.MAX_WORD_IDS", 1 << 16)
NUMBER = Limit("protocol.limits.MAX_NUMBER", 1 << 16)
DIMENSIONS = Limit("protocol.limits.MAX_DIMENSIONS", 64)
RANGES = Limit("models.token_inputs._MAX_RANGES", 1024)
PACKED = Limit("python_models.wire.MAX_FRAME_BYTES", 1 << 30)

OPERATOR = "an operator's or our own text"
PROCESS = "in a process of its own"
THREAD = "in a thread"
ENGINE = "the engine's: tokens of one step, or the text of one sequence"
PROMPT = "a prompt that the engine takes"
VALUE = "one value of an answer"
FLAG = "--http-max-input-size or --grpc-max-message-size, 64 MiB at most: one copy, below 0.1 s"

Bound = Limit | str | tuple[Limit, ...]
Places = dict[str, Bound]


def _all(bound: Bound, calls: str) -> Places:
    return dict.fromkeys(calls.split(), bound)


PLACES: dict[str, Places] = {
    "access/api_keys.py": {"decode": KEY, "b64decode": KEY, "encode": HEAD},
    "access/control.py": {"join": OPERATOR},
    "access/restrictions.py": {"join": OPERATOR, "encode": HEAD},
    # ---- decoding
    "decoding/body.py": {"join": SHORT},
    "decoding/decoder.py": {"recv": THREAD, "SerializeToString": OPERATOR},
    "decoding/exchange.py": {
        **_all(THREAD, "recv recv_bytes frombuffer"), "dumps": PROCESS,
    },
    "decoding/process.py": {"recv": PROCESS},
    # A request to load is read on the loop too, up to `SHORT`.
    "decoding/tasks.py": {"FromString": SHORT},
    # ---- the short way
    "direct/direct_text.py": {"encode": ENGINE},
    "direct/plain_request.py": {
        "encode": INLINE_TEXT, "tolist": INLINE_IDS,
        "decode": Limit("direct.plain_request._MAX_TEXT_BYTES", 16 * KIB),
    },
    # ---- engines
    "engines/client.py": {"join": OPERATOR},
    "engines/group.py": _all(ENGINE, "frombuffer tolist"),
    "engines/live_request.py": {"tolist": ENGINE},
    "engines/model_engines.py": {"join": OPERATOR},
    # ---- gRPC
    "grpc/access.py": {"decode": "gRPC's own limit on metadata, 16 KiB"},
    "grpc/messages.py": {
        "FromString": SHORT, "join": VALUE, "encode": NAME, "decode": NAME,
    },
    "grpc/stream_answers.py": {
        "join": Limit("grpc.stream_answers._MAX_BYTES", 16 * KIB),
        "SerializeToString": "a whole answer: one copy",
    },
    "grpc/status.py": {"encode": SHORT, "decode": STATUS, "join": STATUS},
    # ---- HTTP
    "http/connections.py": {"join": HEAD, "encode": HEAD},
    "http/generate.py": {"encode": ITEMS, "join": ANSWER},
    "http/infer.py": {
        "json_access.parse": SHORT,
        "decompress": Limit("http.infer._SHORT_CODED_BYTES", 4 * KIB), "compress": ANSWER,
        "join": ANSWER,
    },
    "http/messages.py": {
        "join": SMALL_BODY, "compress": ANSWER,
        "decompress": Limit("http.messages._DECODED_BYTES", MIB),
        "json_access.dump": OPERATOR, "encode": OPERATOR,
    },
    "http/queries.py": {"json_access.parse": SMALL_BODY},
    "http/routes.py": {"join": HEAD},
    "http/server.py": {"match": HEAD},
    # ---- inference
    "inference/forwarded_headers.py": {
        "search": Limit("inference.forwarded_headers.MAX_NAME", 256), "decode": HEAD,
    },
    "inference/helper_process.py": {"join": OPERATOR},
    "inference/linear_pattern.py": {"match": "one character"},
    "inference/tensor_bytes.py": {
        **_all(ITEMS, "tolist"), **_all(BYTES, "tobytes join encode"),
        "frombuffer": "a view, without a copy",
    },
    "inference/text_limits.py": {"encode": PROCESS},
    "inference/validation.py": {"join": (NUMBER, DIMENSIONS)},
    # ---- models
    "models/draft_rounds.py": _all(ENGINE, "frombuffer tobytes"),
    "models/encoded_texts.py": {
        **_all(INLINE_TEXT, "encode_batch_fast decode_batch tolist"),
        "tobytes": Limit("models.preprocessing._FEW_WORDS", 256), "encode": OPERATOR,
    },
    "models/factory.py": {"join": OPERATOR},
    "models/graph_model.py": {"join": OPERATOR},
    "models/postprocessing.py": {"encode": ENGINE},
    "models/preprocessing.py": {"encode": INLINE_TEXT},
    "models/sample_inputs.py": {
        "tolist": RANGES, "decode": FLAG,
    },
    "models/sampling_inputs.py": {
        "tolist": WORD_IDS, "tobytes": "a number for each id of the vocabulary",
    },
    "models/sequence_outputs.py": _all(ENGINE, "join frombuffer encode"),
    "models/stop_text.py": {"join": ENGINE},
    "models/text_request.py": {"encode": FLAG, "tobytes": ENGINE},
    "models/text_limits.py": _all(OPERATOR, "loads encode"),
    "models/text_pipeline.py": {"sub": SHORT},
    "models/text_run.py": {"encode": ENGINE, **_all(PROMPT, "tolist decode")},
    "models/token_inputs.py": {"tobytes": FLAG, "encode": FLAG, "join": OPERATOR},
    "models/token_model.py": {"tolist": PROMPT, "join": OPERATOR},
    "models/tokenizer.py": {
        **_all(INLINE_TEXT, "encode encode_batch_fast tolist"),
        **_all(INLINE_IDS, "decode decode_batch join"),
    },
    "models/long_texts.py": _all(
        PROCESS, "encode encode_batch encode_batch_fast loads search sub"
    ),
    "models/tokenizer_pool.py": {"recv": THREAD},
    "models/tokenizer_process.py": _all(PROCESS, "recv encode decode"),
    "models/transaction.py": {"tolist": "one value for each sample of a batch"},
    # ---- OpenAI's protocol
    "openai/answers.py": _all(ENGINE, "encode join json_access.dump"),
    "openai/models.py": {"join": OPERATOR},
    "openai/chat_templates.py": {"search": OPERATOR, **_all(INLINE_BODY, "dumps join")},
    "openai/chats.py": {"json_access.dump": ENGINE},
    "openai/completions.py": {"json_access.dump": ENGINE},
    "openai/endpoint.py": {
        "json_access.dump": Limit("openai.endpoint._INLINE_TOKENS", 512),
    },
    "openai/fields.py": {"json_access.parse": INLINE_BODY, "join": INLINE_BODY},
    "openai/log_probs.py": {
        "decode": VALUE,
        **_all(Limit("openai.endpoint._INLINE_TOKENS", 512), "json_access.dump join"),
    },
    "openai/messages.py": {"loads": INLINE_BODY, "join": INLINE_BODY},
    "openai/outputs.py": _all(ENGINE, "join sub encode"),
    "openai/parsing/pythonic_calls.py": _all(ENGINE, "join loads dumps fullmatch"),
    "openai/response_requests.py": {"join": OPERATOR},
    "openai/response_input.py": {"join": INLINE_BODY, "match": OPERATOR, "sub": OPERATOR},
    "openai/responses.py": _all(ENGINE, "json_access.dump encode join"),
    "openai/parsing/harmony.py": _all(ENGINE, "join search"),
    "openai/parsing/scanner.py": _all(ENGINE, "join dumps encode decode match search"),
    "openai/server.py": {"match": HEAD, **_all(OPERATOR, "b64encode decode encode findall")},
    "openai/parsing/argument_types.py": _all(ENGINE, "loads dumps"),
    "openai/parsing/gemma_calls.py": _all(ENGINE, "join dumps"),
    "openai/parsing/json_calls.py": _all(ENGINE, "join loads dumps"),
    "openai/parsing/named_calls.py": _all(ENGINE, "fullmatch join"),
    "openai/parsing/tagged_calls.py": _all(ENGINE, "join dumps"),
    "openai/errors.py": _all("a message of an error", "join search sub json_access.dump"),
    "openai/parsing/kimi_calls.py": _all(ENGINE, "findall"),
    "openai/parsing/minimax_calls.py": _all(ENGINE, "dumps"),
    "openai/parsing/tool_formats.py": _all(ENGINE, "dumps join"),
    "openai/tools.py": {"join": OPERATOR, "dumps": INLINE_BODY, "fullmatch": INLINE_BODY},
    "openai/tokens.py": {
        **_all(INLINE_IDS, "tolist json_access.dump join"), "encode": INLINE_TEXT,
    },
    # ---- protocol
    "protocol/generate.py": {
        "json_access.parse": SHORT, "json_access.dump": SHORT, "encode": VALUE, "join": VALUE,
    },
    "protocol/infer_json.py": {
        "json_access.parse": SHORT, "match": HEAD, "join": OPERATOR,
    },
    "protocol/infer_message.py": {"join": OPERATOR},
    "protocol/infer_response.py": {"json_access.dump": BYTES, "encode": THREAD},
    "protocol/json_access.py": _all(SHORT, "decode encode search finditer join"),
    "protocol/limits.py": {"encode": SHORT},
    "protocol/load_request.py": {
        "json_access.parse": SHORT, "b64decode": SHORT, "Parse": CONFIG, "fullmatch": NAME,
    },
    "protocol/message_scan.py": {"decode": NAME, "frombuffer": PROCESS},
    "protocol/region_json.py": {"b64decode": SMALL_BODY, "json_access.parse": SMALL_BODY},
    "protocol/tensor_json.py": {
        "encode": SHORT, "tolist": ITEMS, "decode": BYTES, "join": BYTES,
    },
    # ---- Python models
    "python_models/inference_request.py": _all(PROCESS, "dumps join"),
    "python_models/link.py": _all(PROCESS, "encode recv"),
    "python_models/model.py": {"dumps": OPERATOR},
    "python_models/process.py": _all(PROCESS, "encode decode join"),
    "python_models/process_link.py": {"encode": FLAG},
    "python_models/responses.py": {"dumps": PROCESS},
    "python_models/sequence_inputs.py": {"encode": NAME, "join": OPERATOR},
    "python_models/tensors.py": {"join": PROCESS},
    "python_models/utils.py": {"join": PROCESS},
    "python_models/wire.py": {
        "packb": FLAG, "unpackb": PACKED, "join": FLAG, "frombuffer": "a view, without a copy",
    },
    # ---- memory of clients
    "shared_memory/cuda_memory.py": {"decode": "a text of the driver"},
    "shared_memory/system_memory.py": {
        "join": Limit("shared_memory.regions.SHORT_COPY_BYTES", 64 * KIB),
    },
}  # fmt: skip


def places(tree: ast.Module) -> set[str]:
    """The names of `CALLS` and `JSON_CALLS` that a module mentions, called or not."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if node.attr in CALLS:
                found.add(node.attr)
            elif node.attr in JSON_CALLS and ast.unparse(node.value) == "json_access":
                found.add(f"json_access.{node.attr}")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            found |= {node.func.id} & CALLS
    return found


def found_places() -> dict[str, set[str]]:
    """The places of each module in the rooms."""
    found: dict[str, set[str]] = defaultdict(set)
    for source in rules.sources("server"):
        path = source.path.relative_to(rules.ROOT / "server")
        if path.parts[0] in ROOMS:
            found[path.as_posix()] |= places(source.tree)
    return found


def test_each_place_where_data_of_clients_is_converted_has_a_bound():
    unbounded = {
        module: sorted(calls - set(PLACES.get(module, ())))
        for module, calls in found_places().items()
        if calls - set(PLACES.get(module, ()))
    }
    assert unbounded == {}, (
        "say in PLACES what bounds the data there, and mend what is unbounded"
    )


def test_every_place_in_the_table_exists():
    found = found_places()
    stale = {m: sorted(set(calls) - found.get(m, set())) for m, calls in PLACES.items()}
    assert {module: calls for module, calls in stale.items() if calls} == {}


LIMITS = {
    bound for calls in PLACES.values() for bound in calls.values() if type(bound) is Limit
}


@pytest.mark.parametrize("limit", sorted(LIMITS, key=lambda limit: limit.name), ids=str)
def test_each_limit_is_the_number_in_the_code(limit):
    assert limit.current == limit.value


def test_the_search_finds_calls_and_functions_passed_as_arguments():
    text = """
json.loads(a); read = pb.Message.FromString; json_access.parse(b); other.parse(c)
encode(d); array.tolist(); pattern.search(e); tolist = 1
"""
    found = places(ast.parse(text))
    assert found == {"loads", "FromString", "json_access.parse", "encode", "tolist", "search"}
