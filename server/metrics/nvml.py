"""Readings of the host's GPUs through the driver's management library, if there is one."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One GPU now. A figure that the GPU does not report is None."""

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
    """An open management library. Calls take microseconds to a few milliseconds."""

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
        """All GPUs now."""
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
