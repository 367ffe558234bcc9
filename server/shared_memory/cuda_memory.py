"""Regions in the memory of a GPU, through the CUDA driver and its memory handles."""

from __future__ import annotations

import ctypes
import functools
import logging
import sys
import threading
from collections.abc import Sequence
from functools import partial

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.server.shared_memory.region_specs import (
    RegionSpec,
    invalid_args,
    invalid_handle,
    no_gpus,
)

logger = logging.getLogger(__name__)

HANDLE_BYTES = 64
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_byte * HANDLE_BYTES),)


class _DriverError(Exception):
    """A call of the driver failed."""


class _Driver:
    """The driver's functions, with the contexts of the devices in use.

    A context takes some hundred MB of its GPU: it is made for the first region on the GPU.
    """

    def __init__(self) -> None:
        """May raise OSError or `_DriverError`: there is no driver, or no GPU."""
        self._library = ctypes.CDLL(_LIBRARY)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.num_devices = count.value

    def call(self, name: str, *arguments: object) -> None:
        """Call a function.

        Raises:
            _DriverError: names the function and the driver's reason.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise _DriverError(f"{name}: {(text.value or b'unknown').decode()} ({status})")

    def use(self, device_id: int) -> None:
        """Make a device's context that of this thread."""
        context = self._contexts.get(device_id)
        if context is None:
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self.call("cuDeviceGet", ctypes.byref(device), device_id)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self._contexts[device_id] = context
        self.call("cuCtxSetCurrent", context)


@functools.cache
def _driver() -> _Driver | None:
    """None: this host has no GPU that the server may use."""
    try:
        driver = _Driver()
    except (OSError, _DriverError) as error:
        logger.info("CUDA shared memory is refused, there is no GPU: %s", error)
        return None
    return driver if driver.num_devices else None


def _close(driver: _Driver, spec: RegionSpec, address: ctypes.c_uint64) -> None:
    try:
        driver.use(spec.device_id)
        driver.call("cuIpcCloseMemHandle", address)
    except _DriverError as error:
        logger.warning("CUDA region '%s' is not closed: %s", spec.name, error)


class CudaRegion:
    """An allocation of another process on a GPU. All calls may wait for the GPU: they are made
    in threads.
    """

    def __init__(self, spec: RegionSpec) -> None:
        """Open the handle of a region.

        Raises:
            RequestError: there is no GPU, or the handle opens no memory of this size.
        """
        self.spec = spec
        driver = _driver()
        if driver is None:
            raise no_gpus(spec.name)
        if not 0 <= spec.device_id < driver.num_devices:
            raise invalid_handle()
        self._driver = driver
        self._address = ctypes.c_uint64()
        self._is_open = False
        handle = _Handle.from_buffer_copy(spec.raw_handle)
        try:
            driver.use(spec.device_id)
            driver.call(
                "cuIpcOpenMemHandle_v2", ctypes.byref(self._address), handle, _LAZY_PEER_ACCESS
            )
            self._is_open = True
            base, size = ctypes.c_uint64(), ctypes.c_size_t()
            driver.call(
                "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), self._address
            )
        except _DriverError as error:
            logger.info("CUDA region '%s' is refused: %s", spec.name, error)
            raise invalid_handle() from None
        if not 0 < spec.num_bytes <= base.value + size.value - self._address.value:
            raise invalid_args(spec.name)

    def read(self, offset: int, num_bytes: int) -> bytes:
        """A copy of some bytes.

        Raises:
            RequestError: the GPU refuses the copy.
        """
        target = ctypes.create_string_buffer(num_bytes)
        self._copy("cuMemcpyDtoH_v2", target, self._at(offset), ctypes.c_size_t(num_bytes))
        return target.raw

    def write(self, offset: int, parts: Sequence[bytes]) -> None:
        """Write bytes, which fit the region.

        Raises:
            RequestError: the GPU refuses the copy.
        """
        for part in parts:
            size = ctypes.c_size_t(len(part))
            self._copy("cuMemcpyHtoD_v2", self._at(offset), ctypes.c_char_p(part), size)
            offset += len(part)

    def __del__(self) -> None:
        # The last reference may end on the event loop, and the driver may wait for the GPU.
        if getattr(self, "_is_open", False) and not sys.is_finalizing():
            closing = partial(_close, self._driver, self.spec, self._address)
            threading.Thread(target=closing, daemon=True).start()

    def _at(self, offset: int) -> ctypes.c_uint64:
        return ctypes.c_uint64(self._address.value + offset)

    def _copy(self, name: str, *arguments: object) -> None:
        try:
            self._driver.use(self.spec.device_id)
            self._driver.call(name, *arguments)
        except _DriverError as error:
            raise RequestError(
                f"CUDA shared memory region '{self.spec.name}' cannot be copied: {error}",
                ErrorKind.INTERNAL,
            ) from None
