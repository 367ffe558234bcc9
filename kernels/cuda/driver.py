"""Launches of compiled CUDA kernels through the driver, and tensor maps for their copies."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from trimaran.kernels.build import KernelsUnavailableError

READ_ONCE = 0x12F0000000000000
READ_AGAIN = 0x1000000000000000
"""Cache policies of the copy engine: evict first, evict normally."""

_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_TYPES = {
    torch.float16: 6, torch.bfloat16: 9, torch.float8_e4m3fn: 0, torch.int8: 0,
}  # fmt: skip
"""CUtensorMapDataType; bytes are copied as uint8."""
_SWIZZLES = {64: 2, 128: 3}
"""CUtensorMapSwizzle by the bytes of a row in shared memory."""
_PROMOTE_256 = 3
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64
_CLUSTER, _OVERLAP = 4, 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint), ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)), ("num_attributes", ctypes.c_uint),
    )  # fmt: skip


class CudaKernel:
    """One kernel of a module, on one device."""

    def __init__(
        self,
        handle: ctypes.c_void_p,
        num_threads: int,
        shared_bytes: int,
        cluster: int = 1,
        *,
        overlaps: bool = False,
    ) -> None:
        self._handle = handle
        values = [(_CLUSTER, (cluster, 1, 1))] if cluster > 1 else []
        values += [(_OVERLAP, (1, 0, 0))] if overlaps else []
        self._attributes = (_Attribute * 2)()
        for attribute, (kind, value) in zip(self._attributes, values, strict=False):
            attribute.id = kind
            attribute.value[:3] = value
        self._launch = _Launch(
            (1, 1, 1), (num_threads, 1, 1), shared_bytes, None, self._attributes, len(values)
        )

    def launch(self, num_blocks: int, stream: int, *arguments: ctypes.Structure) -> None:
        """Run on ``stream`` (torch's integer handle); ``arguments`` as the kernel declares
        them.

        May be captured in a graph.
        """
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        self._launch.grid[0] = num_blocks
        self._launch.stream = stream
        _call("cuLaunchKernelEx", ctypes.byref(self._launch), self._handle, addresses, None)

    def max_clusters(self, cluster: int) -> int:
        """Number of clusters of this many blocks that the device runs at once."""
        count, function = ctypes.c_int(), ctypes.c_void_p()
        probe = _Launch.from_buffer_copy(self._launch)
        probe.grid[0], probe.num_attributes = cluster, 1
        # Unlike launches, this call needs the device's context on this thread.
        torch.cuda.set_device(torch.cuda.current_device())
        _call("cuKernelGetFunction", ctypes.byref(function), self._handle)
        _call(
            "cuOccupancyMaxActiveClusters", ctypes.byref(count), function,
            ctypes.byref(probe),
        )  # fmt: skip
        return count.value


class CudaModule:
    """Machine code in the driver, until the process ends."""

    def __init__(self, cubin: bytes) -> None:
        self._library = ctypes.c_void_p()
        _call(
            "cuLibraryLoadData", ctypes.byref(self._library), cubin, None, None, 0, None,
            None, 0,
        )  # fmt: skip

    def kernel(
        self,
        name: str,
        device: torch.device,
        *,
        num_threads: int,
        shared_bytes: int = 0,
        cluster: int = 1,
        overlaps: bool = False,
    ) -> CudaKernel:
        """The kernel ``name``, with this much dynamic shared memory a block.

        ``cluster`` blocks run together. With ``overlaps`` the kernel starts before the
        preceding kernel has ended, and has to wait for it (programmatic dependent launch).
        """
        handle = ctypes.c_void_p()
        _call("cuLibraryGetKernel", ctypes.byref(handle), self._library, name.encode())
        if shared_bytes:
            _call(
                "cuKernelSetAttribute", _MAX_DYNAMIC_SHARED, shared_bytes, handle,
                device.index or 0,
            )  # fmt: skip
        return CudaKernel(handle, num_threads, shared_bytes, cluster, overlaps=overlaps)


class TensorMap(ctypes.Structure):
    """A tensor map argument of a kernel; its first 128 bytes are the driver's CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * (_MAP_BYTES // 8)),)


def tensor_map(
    tensor: Tensor, dims: Sequence[int], box: Sequence[int], *, promotes: bool = True
) -> TensorMap:
    """``tensor`` for copies of ``box`` elements in each of its ``dims``, the fastest first.

    The first dim must have stride 1 and 64 or 128 bytes in the box, which lie in shared memory
    in swizzled rows of this size. Elements outside the tensor are read as 0. With ``promotes``
    the L2 cache reads 256 bytes at a time.
    """
    sizes = (ctypes.c_uint64 * len(dims))(*(tensor.shape[dim] for dim in dims))
    strides = (ctypes.c_uint64 * (len(dims) - 1))(
        *(tensor.stride(dim) * tensor.element_size() for dim in dims[1:])
    )
    buffer = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
    start = -ctypes.addressof(buffer) % _MAP_ALIGNMENT
    _call(
        "cuTensorMapEncodeTiled", ctypes.byref(buffer, start), _TYPES[tensor.dtype],
        len(dims), ctypes.c_void_p(tensor.data_ptr()), sizes, strides,
        (ctypes.c_uint32 * len(box))(*box), (ctypes.c_uint32 * len(box))(*[1] * len(box)),
        0, _SWIZZLES[box[0] * tensor.element_size()], _PROMOTE_256 if promotes else 0, 0,
    )  # fmt: skip
    return TensorMap.from_buffer(buffer, start)


class MapCache:
    """Tensor maps, cached by address: the allocator reuses addresses."""

    _MAX_MAPS = 4096

    def __init__(self) -> None:
        self._maps: dict[tuple[object, ...], TensorMap] = {}

    def get(self, tensor: Tensor, dims: Sequence[int], box: Sequence[int]) -> TensorMap:
        """Like `tensor_map`."""
        shape, strides = tensor.shape, tensor.stride()
        key = (tensor.data_ptr(), shape, strides, tensor.dtype, tuple(box))
        found = self._maps.get(key)
        if found is None:
            if len(self._maps) == self._MAX_MAPS:
                self._maps.clear()
            found = self._maps[key] = tensor_map(tensor, dims, box)
        return found


@cache
def _driver() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise KernelsUnavailableError(
            f"the driver of NVIDIA GPUs is missing: {error}"
        ) from None
    # Torch may not have used the device yet.
    if code := library.cuInit(0):
        raise KernelsUnavailableError(f"the driver of NVIDIA GPUs does not start: code {code}")
    return library


def _call(function: str, *arguments: object) -> None:
    if code := getattr(_driver(), function)(*arguments):
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        message = (text.value or b"unknown error").decode()
        raise RuntimeError(f"the driver's {function} fails with code {code}: {message}")
