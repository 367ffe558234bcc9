"""Metrics of the host: processors, memory, and GPUs as NVML reports them."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil
from prometheus_client.core import Metric
from prometheus_client.registry import CollectorRegistry


@dataclass(frozen=True, slots=True)
class GpuReading:
    """The state of one GPU. A value that the GPU does not report is None."""

    uuid: str
    utilization: float | None
    memory_total_bytes: int | None
    memory_used_bytes: int | None
    power_w: float | None
    power_limit_w: float | None
    energy_j: float | None


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (
        ("gpu", ctypes.c_uint),
        ("memory", ctypes.c_uint),
    )


class Nvml:
    """An open NVML library. Calls take microseconds to a few milliseconds."""

    def __init__(self, library: ctypes.CDLL, num_gpus: int) -> None:
        self._library = library
        self._handles: list[ctypes.c_void_p] = []
        for index in range(num_gpus):
            handle = ctypes.c_void_p()
            if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0:
                self._handles.append(handle)

    @classmethod
    def open(cls) -> Nvml | None:
        """The library, or None on a host without a driver or without GPUs."""
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return None
        num_gpus = ctypes.c_uint()
        if library.nvmlInit_v2() != 0:
            return None
        if library.nvmlDeviceGetCount_v2(ctypes.byref(num_gpus)) != 0 or not num_gpus.value:
            return None
        return cls(library, num_gpus.value)

    def read(self) -> list[GpuReading]:
        """The state of all GPUs."""
        return [self._read(handle) for handle in self._handles]

    def _read(self, handle: ctypes.c_void_p) -> GpuReading:
        memory = _Memory()
        has_memory = self._ask("nvmlDeviceGetMemoryInfo", handle, memory)
        utilization = _Utilization()
        has_utilization = self._ask("nvmlDeviceGetUtilizationRates", handle, utilization)
        return GpuReading(
            uuid=self._uuid(handle),
            utilization=utilization.gpu / 100 if has_utilization else None,
            memory_total_bytes=memory.total if has_memory else None,
            memory_used_bytes=memory.used if has_memory else None,
            power_w=self._milli("nvmlDeviceGetPowerUsage", handle, ctypes.c_uint()),
            power_limit_w=self._milli(
                "nvmlDeviceGetEnforcedPowerLimit", handle, ctypes.c_uint()
            ),
            energy_j=self._milli(
                "nvmlDeviceGetTotalEnergyConsumption", handle, ctypes.c_ulonglong()
            ),
        )

    def _ask(
        self,
        function: str,
        handle: ctypes.c_void_p,
        answer: ctypes.Structure | ctypes.c_uint | ctypes.c_ulonglong,
    ) -> bool:
        return bool(getattr(self._library, function)(handle, ctypes.byref(answer)) == 0)

    def _milli(
        self, function: str, handle: ctypes.c_void_p, answer: ctypes.c_uint | ctypes.c_ulonglong
    ) -> float | None:
        return answer.value / 1000 if self._ask(function, handle, answer) else None

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        text = ctypes.create_string_buffer(96)
        self._library.nvmlDeviceGetUUID(handle, text, len(text))
        return text.value.decode()


_GPU_FAMILIES = (
    ("nv_gpu_utilization", "gauge", "GPU utilization rate [0.0 - 1.0)", "utilization"),
    ("nv_gpu_memory_total_bytes", "gauge", "GPU total memory, in bytes", "memory_total_bytes"),
    ("nv_gpu_memory_used_bytes", "gauge", "GPU used memory, in bytes", "memory_used_bytes"),
    ("nv_gpu_power_usage", "gauge", "GPU power usage in watts", "power_w"),
    ("nv_gpu_power_limit", "gauge", "GPU power management limit in watts", "power_limit_w"),
    ("nv_energy_consumption", "counter", "GPU energy consumption in joules", "energy_j"),
)


@dataclass(frozen=True, slots=True)
class HostReading:
    """One host's processors, memory and GPUs at one moment."""

    cpu_utilization: float
    """Share of all cores that was busy since the previous reading."""

    memory_total_bytes: int
    memory_used_bytes: int
    gpus: tuple[GpuReading, ...] = ()


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Which host metrics are shown, and how old they may be."""

    interval_s: float = 2.0
    has_cpu: bool = True
    has_gpu: bool = True


class HostMetrics:
    """Reads the host at scrapes, at most once an interval. GPU families only with GPUs."""

    def __init__(self, registry: CollectorRegistry, options: HostOptions) -> None:
        self._options = options
        self._nvml = Nvml.open() if options.has_gpu else None
        self._read_at = -options.interval_s
        self._reading = HostReading(0.0, 0, 0)
        # The first reading covers the time since this call.
        psutil.cpu_percent(interval=None)
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """`prometheus_client` collects samples here."""
        reading = self.read()
        for name, documentation, value in (
            ("nv_cpu_utilization", "CPU utilization rate [0.0 - 1.0]", reading.cpu_utilization),
            (
                "nv_cpu_memory_total_bytes",
                "CPU total memory (RAM), in bytes",
                reading.memory_total_bytes,
            ),
            (
                "nv_cpu_memory_used_bytes",
                "CPU used memory (RAM), in bytes",
                reading.memory_used_bytes,
            ),
            ("nv_pinned_memory_pool_total_bytes", "Pinned memory pool total size, in bytes", 0),
            ("nv_pinned_memory_pool_used_bytes", "Pinned memory pool used size, in bytes", 0),
        ):
            if name.startswith("nv_cpu_") and not self._options.has_cpu:
                continue
            metric = Metric(name, documentation, "gauge")
            metric.add_sample(name, {}, float(value))
            yield metric
        for name, kind, documentation, attribute in _GPU_FAMILIES if reading.gpus else ():
            metric = Metric(name, documentation, kind)
            for gpu in reading.gpus:
                value = getattr(gpu, attribute)
                if value is not None:
                    metric.add_sample(name, {"gpu_uuid": gpu.uuid}, float(value))
            yield metric

    def read(self) -> HostReading:
        """The state of the host, at most one interval old."""
        now = time.monotonic()
        if now - self._read_at >= self._options.interval_s:
            self._read_at = now
            memory = psutil.virtual_memory()
            self._reading = HostReading(
                cpu_utilization=psutil.cpu_percent(interval=None) / 100,
                memory_total_bytes=memory.total,
                memory_used_bytes=memory.total - memory.available,
                gpus=tuple(self._nvml.read()) if self._nvml is not None else (),
            )
        return self._reading
