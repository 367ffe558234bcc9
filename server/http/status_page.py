"""The operator's status document, as JSON and as an HTML page that loads nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from trimaran.comm.errors import RequestError
from trimaran.server.inference.metadata import server_metadata
from trimaran.server.metrics.history import PERIOD_S, History, Reading, svg_path
from trimaran.server.metrics.measured_model import MeasuredModel
from trimaran.server.metrics.recent_rates import SAMPLE_PERIOD_S, Key, RecentRates

if TYPE_CHECKING:
    from trimaran.server.service import Service

ENGINE_KEYS = (
    "active_requests", "max_requests", "scheduled_requests", "waiting_requests",
    "paused_requests", "kv_used_blocks", "kv_max_blocks", "kv_reused_blocks",
    "kv_used_fraction", "iteration_counter",
)  # fmt: skip


class StatusReport:
    """Collects the document; between `start` and `stop` it samples engines and latencies."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_s = time.monotonic()
        self._release = version("trimaran")
        self._rates = RecentRates()
        self._history = History()
        self._sampler: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample, on the running event loop."""
        self._rates.add(self._service.metrics.latency_counts())
        self._sampler = asyncio.get_running_loop().create_task(self._sample())

    async def stop(self) -> None:
        """End the sampling. May be called without `start`."""
        if self._sampler is not None:
            self._sampler.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._sampler
            self._sampler = None

    def document(self) -> dict[str, Any]:
        """Everything, as JSON members: times in seconds since the epoch, sizes in bytes."""
        service = self._service
        host = service.metrics.read_host()
        return {
            "server": self._server(),
            "models": [self._model(entry) for entry in service.registry.index()],
            "groups": service.board.groups(),
            "faults": service.board.faults(),
            "gpus": [asdict(gpu) for gpu in host.gpus],
            "host": {
                "cpu_utilization": host.cpu_utilization,
                "memory_total_bytes": host.memory_total_bytes,
                "memory_used_bytes": host.memory_used_bytes,
            },
        }

    async def _sample(self) -> None:
        num_samples_of_reading = round(PERIOD_S / SAMPLE_PERIOD_S)
        for index in itertools.count():
            if index % num_samples_of_reading == 0:
                self._history.add(self._readings())
            await asyncio.sleep(SAMPLE_PERIOD_S)
            self._rates.add(self._service.metrics.latency_counts())

    def _readings(self) -> dict[Key, Reading]:
        readings = {}
        for entry in self._service.registry.index():
            engine = self._service.metrics.engine_values(entry.name, entry.version)
            if engine is not None:
                key = (entry.name, entry.version)
                rates = self._rates.rates(key)
                readings[key] = Reading(
                    tokens_per_s=rates.tokens_per_s,
                    waiting_requests=engine.get("waiting_requests", 0.0),
                    kv_used_fraction=engine.get("kv_used_fraction", 0.0),
                    first_token_p99_s=rates.first_token_p99_s,
                )
        return readings

    def _server(self) -> dict[str, Any]:
        service = self._service
        metadata = server_metadata(service.config.server_id)
        is_draining = service.admission.is_draining
        state = "draining" if is_draining else "ready" if service.is_ready else "unavailable"
        return {
            "id": metadata["name"],
            "release": self._release,
            "version": metadata["version"],
            "state": state,
            "running_requests": service.admission.num_running
            + service.metrics.others.num_running,
            "uptime_s": time.monotonic() - self._started_s,
            "time": time.time(),
        }

    def _model(self, entry: Any) -> dict[str, Any]:
        succeeded, failed = self._counts(entry.name, entry.version)
        engine = self._service.metrics.engine_values(entry.name, entry.version)
        key = (entry.name, entry.version)
        return {
            "name": entry.name,
            "version": entry.version,
            "state": entry.state,
            "reason": entry.reason,
            "num_succeeded": succeeded,
            "num_failed": failed,
            "rates": None if engine is None else asdict(self._rates.rates(key)),
            "engine": None if engine is None else _chosen(engine),
            "history": None if engine is None else self._history.of(key),
        }

    def _counts(self, name: str, version: str) -> tuple[int, int]:
        """Requests of a model that succeeded and failed; zeros if the model is unloaded."""
        try:
            model = self._service.registry.get(name, version)
        except RequestError:
            return 0, 0
        if not isinstance(model, MeasuredModel):
            return 0, 0
        message = model.statistics.message()
        self._service.metrics.others.add_statistics(message)
        totals = message.inference_stats
        return totals.success.count, totals.fail.count


def _chosen(engine: Mapping[str, float]) -> dict[str, float]:
    return {key: engine.get(key, 0.0) for key in ENGINE_KEYS}


_DAY_S = 86400


def render_page(status: Mapping[str, Any]) -> str:
    """The page of one status document (`status.StatusReport.document`).

    A browser with scripts refreshes the page every two seconds in place. A browser without
    scripts, such as a text browser, reloads it every five.
    """
    return str(_template().render(s=status))


def _duration(seconds: float) -> str:
    days, rest = divmod(int(seconds), _DAY_S)
    clock = time.strftime("%H:%M:%S", time.gmtime(rest))
    return f"{days} d {clock}" if days else clock


def _clock(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(fraction: float | None) -> str:
    return "-" if fraction is None else f"{100 * fraction:.0f} %"


def _gib(num_bytes: float | None) -> str:
    return "-" if num_bytes is None else f"{num_bytes / (1 << 30):.1f} GiB"


def _whole(value: float) -> str:
    return str(int(value))


def _highest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _strip(values: Sequence[float | None], label: str, top: float | None = None) -> Markup:
    """A line of the last ten minutes; ``top`` is the highest value that has room."""
    num_steps, height = History().max_readings, 30
    path = svg_path(values, num_steps, top or _highest(values) or 0.0, height)
    return Markup(
        '<svg class="strip" viewBox="0 -1 {} {}" preserveAspectRatio="none" role="img" '
        'aria-label="{}"><path d="{}"/></svg>'
    ).format(num_steps - 1, height + 2, label, path)


@functools.cache
def _template() -> Any:
    """The page's template. A front end starts without compiling the template."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        duration=_duration, clock=_clock, ms=_ms, percent=_percent, gib=_gib, whole=_whole,
        highest=_highest, strip=_strip,
    )  # fmt: skip
    text = (
        files("trimaran.server.http").joinpath("status_page.html").read_text(encoding="utf-8")
    )
    return environment.from_string(text)
