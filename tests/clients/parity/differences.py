"""Where the two servers differ, and why: the table that the comparison checks both ways."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# fmt: off


@dataclass(frozen=True)
class Difference:
    """Answers that differ. The expressions are searched in the answers as JSON text."""

    reason: str
    cases: str
    """Expression for the case's group, method and path."""

    reference: str
    ours: str

    def covers(self, case: str, reference: Any, ours: Any) -> bool:
        """Whether this entry explains two answers to a case."""
        return all(
            re.search(pattern, text, re.DOTALL)
            for pattern, text in (
                (self.cases, case),
                (self.reference, text_of(reference)),
                (self.ours, text_of(ours)),
            )
        )


def text_of(answer: Any) -> str:
    """An answer as the text in which the table searches."""
    return json.dumps(answer, ensure_ascii=False)


NEWER = "Trimaran follows Triton 2.73, the reference is 2.51: "
STRICT = "Trimaran refuses what has no effect or no meaning: "
PARSER = "the parser's own words: "

HTTP = (
    # ---- the release that is followed ------------------------------------------------------
    Difference(NEWER + "the version number", r"GET /v2(\?|$)", r'"2\.51\.0"', r'"2\.73\.0"'),
    Difference(NEWER + "readiness of unknown models and versions is their error",
               r"GET .*/ready", "Model version not ready", "Request for unknown model|stol"),
    Difference(NEWER + "a reserved key of shared memory is named",
               "shm/register", "Unable to open", "contains the reserved prefix"),
    Difference(NEWER + "a place of no bytes is inside its region",
               "shm/input", "Invalid offset . byte size", "expected 1 string elements"),
    Difference("the reference is built with CUDA, and this host has no GPU",
               "cudasharedmemory", "shared memory region: invalid args", "GPUs not supported"),
    Difference(NEWER + "an index filter that is no boolean is the client's fault",
               "repository/index", "non-boolean as boolean", "Invalid value for 'ready'"),
    Difference(NEWER + "a header length without digits, or beyond 32 bits",
               "binary", "Raw request must|should be in range",
               "Unable to parse Inference-Header-Content-Length"),
    Difference(NEWER + "the configuration shows a newer field",
               "GET /v2/models/.*chain.*/config", '"ensemble_scheduling"',
                   "max_inflight_requests"),
    Difference("a model's error keeps its code on the generate routes; 2.51 answers 400 to all",
               "generate", '"status": 400', '"status": (404|500|501|503)'),
    # ---- refusals --------------------------------------------------------------------------
    Difference(STRICT + "a body that is no object",
               "POST .*/(logging|setting|index|load|unload)", '"status": 200',
               "non-object as object"),
    Difference(STRICT + "an unload with a body that is no JSON",
               "/unload", '"status": 200', "failed to parse the request JSON buffer"),
    Difference(STRICT + "a negative rate, a number with letters and an unknown level",
               "trace", '"status": 200',
                   "Unable to parse '(trace_level|trace_rate|trace_count|log_frequency)'"),
    Difference(STRICT + "the changes above stay without effect",
               "trace GET", '"(429496729.|5)"', '"trace_file"'),
    Difference(STRICT + "an unload with parameters of other types",
               "/unload", '"status": 200', "non-boolean as boolean|members for non-object"),
    Difference(STRICT + "a configuration without inputs, or of another model",
               "repository/load", '"status": 200', '"status": 500'),
    Difference(STRICT + "what such a configuration would have changed",
               "repository/after GET /v2/models/text/config", "name", "name"),
    Difference(STRICT + "an output of another type than the configuration's",
               "failing", '"status": 200.*0.0', "output 'NEVER' is FP32"),
    Difference(STRICT + "a body that ends before its compression does",
               "coding", '"status": (200|500)', "the data ends too early"),
    # ---- lenience --------------------------------------------------------------------------
    Difference("percent-encoded names are decoded, as tritonclient encodes them",
               "%", "%", "."),
    Difference("percent-encoded names are decoded, as tritonclient encodes them",
               "te%78t/ready", "not ready", '"status": 200'),
    Difference("an empty content coding is none, and names are compared without case",
               "coding", "only 'identity' is supported|Unsupported compression",
               '"status": 200'),
    Difference("names of accepted codings are compared without case", "coding",
               '"body": .{0,20}"n1"', '"Content-Encoding": "gzip"'),
    Difference("more classes than 32 bits can count are all classes; 2.51 counts modulo 2^32",
               "classification", '"datatype": "(INT32|FP32)"', '"datatype": "BYTES"'),
    Difference("a verbosity beyond 32 bits is the highest; 2.51 counts modulo 2^32",
               "logging", '"log_verbose_level": 0', '"log_verbose_level": 4294967295'),
    Difference("a number beyond a double is read as infinity, as the literal is",
               "malformed|types|infer", "Number too big", "."),
    # ---- words -----------------------------------------------------------------------------
    Difference(PARSER + "the reason and the offset of a syntax error",
               ".", "failed to parse the request JSON buffer",
               "failed to parse the request JSON buffer"),
    Difference(PARSER + "a cut that leaves whole JSON before other bytes",
               "binary", "additional bytes", "root must not be followed"),
    Difference("the text of a failed decompression; 2.51 reads the body as raw",
               "coding", "Raw request", "failed to decompress the request"),
    Difference("the error of a Python model has no traceback: the log has it",
               "failing|raw", "model 'failing_0'.*At:", "model 'failing'"),
    Difference("2.51 names the input that its hash map gives first",
               "infer", "(batch size does not match|unexpected shape)",
               "(batch size does not match|unexpected shape)"),
    Difference("2.51 lists inputs in the order of its hash map, and loses a bracket",
               "infer", r"missing required input\(s\) \]", r"missing required input\(s\) \[\]"),
    Difference("more elements than 63 bits count are named as that",
               "infer", "unexpected shape", "invalid shape"),
    Difference("the text names the output that has no JSON form",
               "types", "for output\"", "for output OUT_FP16"),
    Difference("the text names the model's input, not raw_input",
               "binary/raw", "input 'raw_input'", "byte size mismatch for input"),
    Difference("a string that is cut is named before the number of strings",
               "binary/text|shm/input", "string elements|incomplete string data",
               "incomplete string data"),
    Difference("an input is read before the input after it is added",
               "infer/mutated", "already exists in request", "Unable to parse"),
    Difference("an empty list is an input without a shape",
               "generate", r"expected 1 string elements|can not convert input|\[\]",
               "has no shape|unexpected shape"),
    Difference("rows are counted before bytes",
               "infer", "byte size mismatch|expected 1 string elements",
                   "batch size|batch-size"),
    Difference("a number that the type cannot hold is found before the count",
               "infer", "Shape does not match", "non-signed-integer"),
    Difference("a refused load says why",
               "repository/load", "failed to poll from model repository\"",
               "failed to load '.*(model configuration|override files|Make them equal)"),
    Difference("an empty configuration is none", "repository/load", "failed to poll",
               '"status": 200'),
    Difference("a backend that is not there is the repository's error",
               "repository/load", "unable to find backend library", "is no Python model"),
    Difference("a repeated name is found after the conversion of 'parameters'",
               "generate", "Converting keyword: 'parameters'", "already exists in request"),
)

GRPC = (
    Difference(NEWER + "the version number", "ServerMetadata", r"2\.51", r"2\.73"),
    Difference(NEWER + "readiness of unknown models and versions is their error",
               "ModelReady", '"OK"', "unknown model|stol|integral value"),
    Difference(NEWER + "a place of no bytes is inside its region",
               "shared memory", "Invalid offset . byte size", "expected 1 string elements"),
    Difference(NEWER + "a size or an offset below 0 is refused; 2.51 counts modulo 2^64",
               "shared memory", "OK|Invalid offset . byte size", "Integer overflow detected"),
    Difference("the reference is built with CUDA, and this host has no GPU",
               "CudaShared", "shared memory region: invalid args", "GPUs not supported"),
    Difference(STRICT + "a CUDA handle of another size",
               "CudaShared", "shared memory region: invalid args", "'raw_handle' must be"),
    Difference("a string that is cut is refused before the model runs",
               "shared memory ModelStreamInfer", "incomplete string data",
               "incomplete string data"),
    Difference(STRICT + "a version with other characters behind its digits",
               "query|contents", ".", "specified version string '1.0'"),
    Difference(STRICT + "a negative rate and an unknown level", "trace", '"OK"',
               "Unable to parse '(trace_level|trace_rate|log_frequency)'"),
    Difference("the space is that of the text over HTTP", "trace", "got: -2", "got:-2"),
    Difference("a refused load says why", "repository", 'repository"', "override files"),
    Difference("names are checked before shapes",
               "mutated", "has no shape", "unexpected inference input"),
    Difference(STRICT + "a negative timeout",
               "parameters", '"OK"', "invalid value for 'timeout'"),
    Difference("a negative sequence id is told to the model as it is; 2.51 counts modulo 2^64",
               "parameters", '"OK"', '"OK"'),
    Difference("rows are counted before bytes",
               "contents|mutated", "OK|byte size mismatch|string elements",
               "batch size does not match|batch-size must be"),
    Difference("2.51 names the input that its hash map gives first",
               "mutated", "batch size does not match|unexpected shape|data-type|dimensions",
               "batch size does not match|unexpected shape|data-type|dimensions"),
    Difference("the error of a Python model has no traceback: the log has it",
               "failing|stream", "model 'failing_0'.*At:", "model 'failing'"),
)


def reason_of(
    table: tuple[Difference, ...], case: str, reference: Any, ours: Any
) -> Difference | None:
    """The first entry that explains two answers."""
    return next((each for each in table if each.covers(case, reference, ours)), None)
