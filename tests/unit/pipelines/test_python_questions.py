"""What the code of a Python model hears of a question that fails."""

from prometheus_client import CollectorRegistry

from trimaran.server.custom_metrics import CustomMetrics, HeldMetrics
from trimaran.server.python_models.calls import ModelCalls
from trimaran.server.python_models.wire import Question
from trimaran.server.registry import ModelRegistry


class FullDisk:
    """A loader that can write nothing."""

    async def load(self, request):
        raise OSError(28, "No space left on device")


async def test_a_question_that_fails_is_answered_so_that_nobody_waits_for_ever(caplog):
    metrics = CustomMetrics(CollectorRegistry())
    calls = ModelCalls(ModelRegistry(), metrics)
    calls.loader = FullDisk()
    wanted = {"name": "llama", "config": "", "files": {}}
    question = Question(call=7, verb="load_model", arguments=wanted)

    result = await calls.answer(question, HeldMetrics(metrics))

    assert (result.call, result.kind) == (7, "INTERNAL")
    assert result.error == "OSError: [Errno 28] No space left on device"
    assert "load_model, asked by a Python model, failed" in caplog.text
