"""Failed questions, as the code of a Python model sees them."""

import pytest
from prometheus_client import CollectorRegistry

from trimaran.comm.errors import RequestError
from trimaran.server.inference.registry import ModelRegistry
from trimaran.server.metrics.custom_metrics import CustomMetrics, HeldMetrics
from trimaran.server.metrics.exposition import render
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.wire import Question


class FullDisk:
    """A loader that can write nothing."""

    async def load(self, request):
        raise OSError(28, "No space left on device")


async def test_a_failed_query_of_a_model_is_answered_with_the_error(caplog):
    metrics = CustomMetrics(CollectorRegistry())
    calls = ModelCalls(ModelRegistry(), metrics)
    calls.loader = FullDisk()
    wanted = {"name": "llama", "config": "", "files": {}}
    question = Question(call=7, verb="load_model", arguments=wanted)

    result = await calls.answer(question, HeldMetrics(metrics))

    assert (result.call, result.kind) == (7, "INTERNAL")
    assert result.error == "OSError: [Errno 28] No space left on device"
    assert "load_model, asked by a Python model, failed" in caplog.text


def test_a_refused_metric_does_not_block_its_name():
    metrics = CustomMetrics(CollectorRegistry())
    with pytest.raises(RequestError, match=r"buckets \[2.0, 1.0\], which do not rise"):
        metrics.hold("length", "of answers", "histogram", (), (2.0, 1.0))
    assert not list(metrics.collect())

    metrics.hold("length", "of answers", "gauge", ())

    assert [metric.type for metric in metrics.collect()] == ["gauge"]


@pytest.mark.parametrize(
    ("kind", "label"),
    [
        ("counter", "my-label"), ("counter", ""), ("gauge", 'a"b'), ("gauge", "1st"),
        ("gauge", "__name__"), ("histogram", "le"),
    ],
)  # fmt: skip
def test_an_invalid_metric_label_is_refused(kind, label):
    metrics = CustomMetrics(CollectorRegistry())
    bounds = (1.0,) if kind == "histogram" else ()
    metrics.hold("kept", "of answers", kind, (("model", 'a-b "c"\n'), ("_x1", "")), bounds)

    with pytest.raises(RequestError, match="has the label"):
        metrics.hold("length", "of answers", kind, ((label, "v"),), bounds)

    assert [metric.name for metric in metrics.collect()] == ["kept"]


def test_a_metric_label_that_is_not_utf8_keeps_the_page_readable():
    registry = CollectorRegistry()
    metrics = CustomMetrics(registry)

    metrics.hold("requests", "of clients", "gauge", (("id", "caf\udce9"),))

    assert 'requests{id="caf?"} 0\n' in render(registry.collect(), {}).decode()
