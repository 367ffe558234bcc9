"""Decisions of rank 0: which adapters are cached on the host, and which on the device."""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trimaran.comm.errors import ErrorKind, RequestError
from trimaran.comm.messages.messages import Submit
from trimaran.worker.config.engine_config import LoraConfig
from trimaran.worker.lora.adapter_messages import CHUNK_BYTES, OutgoingAdapter
from trimaran.worker.lora.cache_allocator import CacheAllocator
from trimaran.worker.lora.formats import AdapterFolders, AdapterSource, AdapterTensors, key_of
from trimaran.worker.lora.layout import AdapterFormatError, AdapterLayout, check_values
from trimaran.worker.lora.store import CHUNK, DROP, EXPECT, LOAD
from trimaran.worker.requests.request import Request

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 256
"""Characters of an unknown adapter name in an error: a client may send any length."""

_MANY = 256
"""Requests of an adapter that are kept before finished requests are removed."""

_MAX_SENT_BYTES = (1 << 31) - (64 << 20)
"""Largest adapter in bytes: a single message may hold a whole adapter, and larger messages
cannot be sent to other hosts."""

_MAX_CHECKED = 4096
"""Digests of checked adapters that are kept; the least recently used one goes first."""

AdapterOp = tuple[Any, ...]
"""An operation on an adapter; see `lora.store`."""

Key = int | str
"""A LoRA task id, or the name of an adapter's folder."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of an adapter."""

    number: int
    """Never reused: KV blocks and decisions name the adapter by this number."""

    key: Key
    size: int
    """Elements of a rank's shard."""

    content: object
    """Equal for two versions with the same weights."""

    requests: list[Request] = field(default_factory=list)
    """The requests of this adapter; some of them may have finished."""

    max_requests: int = _MANY
    """Length of `requests` at which finished requests are removed."""

    slot: int = -1
    first: int = -1
    """First element in the device memory of all adapters, while the adapter has a slot."""

    is_replaced: bool = False
    """Whether a newer version has the same key."""

    was_packed: bool = False
    """Whether this rank has the whole shard in memory; stays True."""

    @property
    def is_running(self) -> bool:
        """Whether a scheduled sequence uses the adapter, which then stays on the device."""
        return any(one.row >= 0 for request in self.requests for one in request.sequences)


class AdapterManager:
    """Two caches of adapters: one in host memory, one in device memory.

    Both replace the least recently used adapter, never one that a request uses. Operations
    before the next step carry each change to all ranks, so that the caches of all ranks are
    equal.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        config: LoraConfig,
        element_bytes: int,
        device_size: int,
        max_slots: int,
    ) -> None:
        """``device_size``: elements of device memory for adapters."""
        self._layout = layout
        self._config = config
        self._element_bytes = element_bytes
        self._allocator = CacheAllocator(device_size)
        self.is_open: Callable[[Request], bool] = lambda request: not request.is_finished
        """Whether a request may still need its adapter. The engine replaces this default."""
        self.is_packed: Callable[[int], bool] = lambda number: True
        """Whether this rank has a whole adapter in memory. The store replaces this default."""
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._folders = AdapterFolders(config.prefetch_dir)
        self._by_key: dict[Key, Adapter] = {}
        self._on_host: OrderedDict[int, Adapter] = OrderedDict()
        self._on_device: OrderedDict[int, Adapter] = OrderedDict()
        """Both by number, the least recently used first."""
        self._host_bytes = 0
        self._finite: OrderedDict[object, None] = OrderedDict()
        """Contents whose values were checked, shared by all data-parallel ranks, the least
        recently used first. A small host cache drops adapters that soon come again, so this
        list is longer."""
        self._last_number = 0
        self.num_loaded = 0
        """Copies of adapters to the device so far."""
        self._ops: list[AdapterOp] = []
        self._unsent: OrderedDict[int, deque[memoryview]] = OrderedDict()
        """Chunks of adapters that were not sent to the ranks yet, by number."""

    def for_other_dp_rank(self) -> AdapterManager:
        """A manager with the same adapters for another data-parallel rank. Called before any
        decision."""
        other = AdapterManager(
            self._layout,
            self._config,
            self._element_bytes,
            self._allocator.size,
            len(self._free_slots),
        )
        other._finite = self._finite
        for adapter in self._on_host.values():
            other._keep(adapter.key, adapter.size, adapter.content)
        return other

    # ---- requests ------------------------------------------------------------------------

    def enter(self, message: Submit, request: Request) -> int:
        """The number of a request's adapter, in use until the request ends; 0 for a request
        without adapter.

        Raises:
            RequestError: the adapter is not cached and did not come with the request, or is
                unusable.
        """
        if not request.has_adapter:
            return 0
        adapter = self.keep(message.adapter_id, message.adapter or {})
        if len(adapter.requests) >= adapter.max_requests:
            self._is_wanted(adapter)
            # Twice the rest: the cost a request is constant, however many are open.
            adapter.max_requests = max(_MANY, 2 * len(adapter.requests))
        adapter.requests.append(request)
        self._on_host.move_to_end(adapter.number)
        return adapter.number

    def keep(
        self, task: int, given: dict[str, Any], made: list[OutgoingAdapter] | None = None
    ) -> Adapter:
        """The adapter of a task id, or of the name in ``given``; from now on it is cached.

        ``made`` is the adapter's message if another data-parallel rank has built it; otherwise
        the message is built here and appended to ``made``.

        Raises:
            RequestError: see `enter`.
        """
        key = _key(task, given)
        try:
            return self._find(key, given, [] if made is None else made)
        except AdapterFormatError as error:
            raise RequestError(f"LoRA task {key}: {error}") from None

    def _find(self, key: Key, given: dict[str, Any], made: list[OutgoingAdapter]) -> Adapter:
        """The adapter of a request: sent with the request, cached, or read from a folder."""
        cached = self._by_key.get(key)
        if "weights" in given or "config" in given:
            return self._from_request(key, given, cached, made)
        folder = self._folders.find(key)
        if folder is not None and (cached is None or self._folders.holds(cached.content)):
            return self._from_folder(key, folder, cached)
        if cached is not None:
            return cached
        if isinstance(key, str):
            raise RequestError(
                f"no LoRA adapter is named {key[:_SHOWN_CHARACTERS]!r}; known names: "
                f"{', '.join(self._folders.names()) or 'none'} (folders in lora_prefetch_dir)"
            )
        raise RequestError(
            f"LoRA task {key} not found in cache. Please send LoRA weights with request"
        )

    def _from_request(
        self,
        key: Key,
        given: dict[str, Any],
        cached: Adapter | None,
        made: list[OutgoingAdapter],
    ) -> Adapter:
        if "weights" not in given or "config" not in given:
            raise RequestError(
                f"LoRA task {key}: lora_weights and lora_config must be given together"
            )
        content = given.get("digest", b"")
        if cached is not None and content and cached.content == content:
            return cached
        tensors = AdapterTensors.from_wire(given["weights"], given["config"])
        size = self._checked_size(tensors)
        self._check_values(tensors, content)
        self._make_room(key, size)
        if not made:
            made.append(self._outgoing(tensors))
        return self._send(key, size, content, made[0])

    def _from_folder(self, key: Key, folder: Path, cached: Adapter | None) -> Adapter:
        content: object = self._folders.content(folder)
        if cached is not None and cached.content == content:
            return cached
        source = self._folders.read(folder)
        size = self._checked_size(source)
        self._check_values(source, content)
        # Clients soon repeat a request that lacked room: the refusal reads no weights.
        self._make_room(key, size)
        outgoing = self._outgoing(source)
        content = self._content_of_read(folder, source, content)
        return self._send(key, size, content, outgoing)

    def _send(self, key: Key, size: int, content: object, outgoing: OutgoingAdapter) -> Adapter:
        """Cache an adapter that was checked, and queue its message to all ranks."""
        adapter = self._keep(key, size, content)
        self._ops.append((EXPECT, adapter.number, outgoing.rows))
        self._unsent[adapter.number] = deque(outgoing.chunks())
        return adapter

    def _outgoing(self, source: AdapterSource) -> OutgoingAdapter:
        """The message of an adapter to all ranks."""
        return OutgoingAdapter.of(source.matrices(self._layout), self._layout.dtype)

    def prefetch(self) -> Iterator[tuple[int, OutgoingAdapter]]:
        """At the start: the adapters of all folders, as many as the host cache holds.

        The caller passes these adapters to every rank; operations do not carry them.
        """
        for key, folder in self._folders.all():
            try:
                content: object = self._folders.content(folder)
                source = self._folders.read(folder)
                size = self._checked_size(source)
                num_bytes = self._host_bytes + size * self._element_bytes
                if num_bytes > self._config.host_memory_bytes:
                    logger.info(
                        "adapter %s waits for a request: the host cache is full", folder
                    )
                    continue
                self._check_values(source, content)
                outgoing = self._outgoing(source)
                content = self._content_of_read(folder, source, content)
            except (AdapterFormatError, RequestError) as error:
                logger.error("adapter %s is left out: %s", folder, error)
                continue
            yield self._keep(key, size, content).number, outgoing

    # ---- the host's cache ----------------------------------------------------------------

    def _keep(self, key: Key, size: int, content: object) -> Adapter:
        """Cache a new adapter, or a new version of an adapter, that was checked."""
        self._make_room(key, size)
        self._retire(key)
        self._last_number += 1
        adapter = Adapter(number=self._last_number, key=key, size=size, content=content)
        self._by_key[key] = adapter
        self._on_host[adapter.number] = adapter
        self._host_bytes += size * self._element_bytes
        return adapter

    def knows(self, message: Submit) -> bool:
        """Whether an adapter with this id or name is cached, in any version."""
        return _key(message.adapter_id, message.adapter or {}) in self._by_key

    def digest_of(self, task: int) -> bytes:
        """The digest of the weights that came with a request for this task id; empty if the
        cached adapter is from a folder, or if no adapter is cached.
        """
        cached = self._by_key.get(task)
        content = b"" if cached is None else cached.content
        return content if isinstance(content, bytes) else b""

    def retire(self, task: int, given: dict[str, Any]) -> None:
        """Serve no more requests from the cached adapter of this id or name: a newer version
        exists, for which this cache had no room."""
        self._retire(_key(task, given))

    def _retire(self, key: Key) -> None:
        replaced = self._by_key.pop(key, None)
        if replaced is not None:
            replaced.is_replaced = True
            if not self._is_wanted(replaced):
                self._drop(replaced)

    def _checked_size(self, source: AdapterSource) -> int:
        """Elements of an adapter's shard on a rank. Refuses an adapter that cannot be sent
        or exceeds the size of a cache. Reads no weights.
        """
        source.check(self._layout, self._config.max_adapter_size)
        num_sent = 0
        for module, layer, rank in source.ranks:
            num_sent += rank * sum(self._layout.shape_of(module, layer) or ())
        if num_sent * self._element_bytes > _MAX_SENT_BYTES:
            raise AdapterFormatError(
                f"the adapter takes {num_sent * self._element_bytes} bytes in the model's "
                f"type, but at most {_MAX_SENT_BYTES} can be sent to all ranks. Serve one of "
                "a smaller size."
            )
        size = self._layout.size_of(source.ranks)
        num_bytes = size * self._element_bytes
        if size > self._allocator.size:
            raise RequestError(
                f"the adapter takes {num_bytes} bytes, but the cache beside the model has "
                f"{self._allocator.size * self._element_bytes}. Raise "
                "lora_cache_gpu_memory_fraction, or lower kv_cache_free_gpu_mem_fraction."
            )
        if num_bytes > self._config.host_memory_bytes:
            raise RequestError(
                f"the adapter takes {num_bytes} bytes, but the host cache has "
                f"{self._config.host_memory_bytes}. Raise lora_cache_host_memory_bytes."
            )
        return size

    def _check_values(self, source: AdapterSource, content: object) -> None:
        """Check that all values are finite in the model's dtype, unless this content was."""
        if content not in self._finite:
            check_values(source.matrices(self._layout), self._layout.dtype)
        if content:
            self._finite[content] = None
            self._finite.move_to_end(content)
            if len(self._finite) > _MAX_CHECKED:
                self._finite.popitem(last=False)

    def _content_of_read(self, folder: Path, source: AdapterSource, content: object) -> object:
        """The content to record for weights that were read from a folder: ``content``, or a
        unique value if the folder's files changed during the read."""
        if self._folders.is_still(folder, content):
            return content
        self._finite.pop(content, None)
        check_values(source.matrices(self._layout), self._layout.dtype)
        return self._folders.unknown(folder)

    def _make_room(self, key: Key, size: int) -> None:
        """Drop adapters until the host has room for another adapter.

        Raises:
            RequestError: adapters in use fill the host cache, and no adapter is dropped.
        """
        limit = self._config.host_memory_bytes - size * self._element_bytes
        idle = [adapter for adapter in self._on_host.values() if not self._is_wanted(adapter)]
        num_used = self._host_bytes - sum(one.size for one in idle) * self._element_bytes
        if num_used > limit:
            raise RequestError(
                "the host cache of LoRA adapters "
                f"({self._config.host_memory_bytes} bytes) is full of adapters that running "
                "requests use. Try again later, or raise lora_cache_host_memory_bytes.",
                ErrorKind.UNAVAILABLE,
            )
        # The new version replaces the adapter with the same key: drop the old version first.
        for adapter in sorted(idle, key=lambda one: one.key != key):
            if self._host_bytes > limit or adapter.is_replaced:
                self._drop(adapter)

    def _is_wanted(self, adapter: Adapter) -> bool:
        """Whether an open request needs the adapter, which then stays on the host."""
        adapter.requests = [request for request in adapter.requests if self.is_open(request)]
        return bool(adapter.requests)

    def _drop(self, adapter: Adapter) -> None:
        if adapter.slot >= 0:
            self._unload(adapter)
        del self._on_host[adapter.number]
        if self._by_key.get(adapter.key) is adapter:
            del self._by_key[adapter.key]
        self._host_bytes -= adapter.size * self._element_bytes
        self._unsent.pop(adapter.number, None)
        self._ops.append((DROP, adapter.number))

    # ---- the device's memory --------------------------------------------------------------

    def is_ready(self, number: int) -> bool:
        """Whether this rank can load the adapter without a wait; 0 is no adapter."""
        if not number:
            return True
        adapter = self._on_host[number]
        if not adapter.was_packed:
            is_there = number not in self._unsent and self.is_packed(number)
            adapter.was_packed = adapter.slot >= 0 or is_there
        return adapter.was_packed

    def make_ready(self, number: int) -> bool:
        """Give an adapter a slot on the device; False if adapters of running sequences leave no
        room. 0 is no adapter."""
        if not number:
            return True
        adapter = self._on_host[number]
        if adapter.slot < 0 and not self._load(adapter):
            return False
        self._on_device.move_to_end(number)
        return True

    def _load(self, adapter: Adapter) -> bool:
        first = self._allocator.take(adapter.size) if self._free_slots else None
        for other in list(self._on_device.values()) if first is None else ():
            if first is not None:
                break
            if not other.is_running:
                # Steps in flight may still read this memory: the load that overwrites it runs
                # after them.
                self._unload(other)
                first = self._allocator.take(adapter.size)
        if first is None:
            return False
        adapter.first, adapter.slot = first, self._free_slots.pop()
        self._on_device[adapter.number] = adapter
        self.num_loaded += 1
        for chunk in self._unsent.pop(adapter.number, ()):
            self._ops.append((CHUNK, adapter.number, chunk))
        self._ops.append((LOAD, adapter.number, adapter.slot, first))
        return True

    def _unload(self, adapter: Adapter) -> None:
        self._allocator.give_back(adapter.first)
        self._free_slots.append(adapter.slot)
        adapter.slot = adapter.first = -1
        del self._on_device[adapter.number]

    # ---- operations that ranks carry out --------------------------------------------------

    @property
    def has_ops(self) -> bool:
        """Whether operations or chunks are waiting to be sent to the ranks."""
        return bool(self._ops or self._unsent)

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an adapter that is being sent."""
        return bool(self._unsent) and self._is_awaited(self._most_urgent())

    def take_ops(self, room: int | None = None) -> list[AdapterOp]:
        """The operations that ranks carry out before the next step, with chunks of adapters
        that no scheduled request needs yet, up to ``room`` or `CHUNK_BYTES` bytes."""
        ops, self._ops = self._ops, []
        room = CHUNK_BYTES if room is None else room
        while self._unsent and room > 0:
            number = self._most_urgent()
            chunks = self._unsent[number]
            while chunks and room > 0:
                ops.append((CHUNK, number, chunks.popleft()))
                room -= len(ops[-1][2])
            if not chunks:
                del self._unsent[number]
        return ops

    def _most_urgent(self) -> int:
        """The first adapter being sent that a request waits for, or else the first.

        After a restart, many adapters are sent that no request needs yet.
        """
        first = next(iter(self._unsent))
        return next(filter(self._is_awaited, self._unsent), first)

    def _is_awaited(self, number: int) -> bool:
        adapter = self._on_host[number]
        # Usually the first request is open, and the other requests need no check.
        is_first_open = bool(adapter.requests) and self.is_open(adapter.requests[0])
        return is_first_open or self._is_wanted(adapter)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host cache in use."""
        return self._config.host_memory_bytes

    @property
    def num_on_host(self) -> int:
        """Adapters in the host's cache."""
        return len(self._on_host)

    @property
    def num_on_device(self) -> int:
        """Adapters in the device's memory."""
        return len(self._on_device)

    @property
    def num_used(self) -> int:
        """Adapters of unfinished requests."""
        return sum(self._is_wanted(adapter) for adapter in self._on_host.values())


def _key(task: int, given: dict[str, Any]) -> Key:
    """The key that a request names its adapter by."""
    name = given.get("name", "")
    return key_of(name) if name else task
