"""Which adapters are kept on the host and which where the model runs: rank 0's decisions."""

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
from trimaran.worker.lora.adapter_messages import PIECE_BYTES, OutgoingAdapter
from trimaran.worker.lora.cache_allocator import CacheAllocator
from trimaran.worker.lora.formats import AdapterFolders, AdapterSource, AdapterTensors, key_of
from trimaran.worker.lora.layout import AdapterFormatError, AdapterLayout, check_values
from trimaran.worker.lora.store import DROP, EXPECT, LOAD, PIECE
from trimaran.worker.requests.request import Request

logger = logging.getLogger(__name__)

_SHOWN_CHARACTERS = 256
"""Characters of an unknown adapter name in an error: a client may send any length."""

_MANY = 256
"""So many requests of an adapter are kept before those that are over are looked for."""

_MOST_SENT_BYTES = (1 << 31) - (64 << 20)
"""Of an adapter: one message may have to hold it all, and no larger one can be
sent to other hosts."""

_MOST_SEEN = 4096
"""Contents of adapters that need no second look: what was asked for lately."""

AdapterOp = tuple[Any, ...]
"""What becomes of an adapter; see `lora.store`."""

Key = int | str
"""A LoRA task id, or the name of an adapter's folder."""


@dataclass(slots=True, eq=False)
class Adapter:
    """One version of an adapter."""

    number: int
    """Never used again: KV blocks and decisions go by it."""

    key: Key
    size: int
    """Elements of a rank's share."""

    content: object
    """Equal for two versions with the same weights."""

    requests: list[Request] = field(default_factory=list)
    """Those that asked for it, some of which may be over."""

    most_requests: int = _MANY
    """From so many on those that are over are forgotten."""

    slot: int = -1
    first: int = -1
    """Its place in the memory of all, while it has a slot."""

    is_replaced: bool = False
    """A newer version has its key."""

    was_packed: bool = False
    """This rank could load it at once, and can from then on."""

    @property
    def is_running(self) -> bool:
        """Whether a sequence with a row needs it: it stays where the model runs."""
        return any(one.row >= 0 for request in self.requests for one in request.sequences)


class AdapterManager:
    """The caches of adapters: one on the host, one where the model runs.

    Both forget what was used least recently, never what a request uses. What a cache does
    all ranks are told before the next step, so that they hold the same.
    """

    def __init__(
        self,
        layout: AdapterLayout,
        config: LoraConfig,
        element_bytes: int,
        device_size: int,
        max_slots: int,
    ) -> None:
        """``device_size`` elements of memory are there for adapters in use."""
        self._layout = layout
        self._config = config
        self._element_bytes = element_bytes
        self._allocator = CacheAllocator(device_size)
        self.is_open: Callable[[Request], bool] = lambda request: not request.is_finished
        """Whether a request may still need its adapter; the engine knows better."""
        self.is_packed: Callable[[int], bool] = lambda number: True
        """Whether this rank could load an adapter at once; its store knows."""
        self._free_slots = list(range(max_slots - 1, -1, -1))
        self._folders = AdapterFolders(config.prefetch_dir)
        self._by_key: dict[Key, Adapter] = {}
        self._on_host: OrderedDict[int, Adapter] = OrderedDict()
        self._on_device: OrderedDict[int, Adapter] = OrderedDict()
        """Both by number, the least recently used first."""
        self._host_bytes = 0
        self._finite: OrderedDict[object, None] = OrderedDict()
        """Contents whose numbers need no second look, of any lane, the least recently used
        first. Not those on the host alone: where it has room for few, they come again."""
        self._last_number = 0
        self.num_loaded = 0
        """Times that an adapter was brought to where the model runs."""
        self._ops: list[AdapterOp] = []
        self._unsent: OrderedDict[int, deque[memoryview]] = OrderedDict()
        """Pieces of adapters that ranks were not sent yet, by number."""

    def of_another_lane(self) -> AdapterManager:
        """One for ranks that hold what this one's hold; before anything is decided."""
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
        """The number of the adapter that a request asks for, kept until its end; 0 for none.

        Raises:
            RequestError: it is not cached and did not come along, or is unusable.
        """
        if not request.has_adapter:
            return 0
        adapter = self.keep(message.adapter_id, message.adapter or {})
        if len(adapter.requests) >= adapter.most_requests:
            self._is_wanted(adapter)
            # Twice those that are left: a request costs the same however many are open.
            adapter.most_requests = max(_MANY, 2 * len(adapter.requests))
        adapter.requests.append(request)
        self._on_host.move_to_end(adapter.number)
        return adapter.number

    def keep(
        self, task: int, given: dict[str, Any], made: list[OutgoingAdapter] | None = None
    ) -> Adapter:
        """The adapter of a task id, or of the name in ``given``, which is cached from now on.

        What ranks get of weights in ``given`` is the one that was ``made``, by another lane,
        or is added there.

        Raises:
            RequestError: as of `enter`.
        """
        key = _key(task, given)
        try:
            return self._find(key, given, [] if made is None else made)
        except AdapterFormatError as error:
            raise RequestError(f"LoRA task {key}: {error}") from None

    def _find(self, key: Key, given: dict[str, Any], made: list[OutgoingAdapter]) -> Adapter:
        """The adapter of a request: its own, the cached one, or that of a folder."""
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
        # Who is refused for want of room asks again soon: nothing is read for that.
        self._make_room(key, size)
        outgoing = self._outgoing(source)
        content = self._content_of_read(folder, source, content)
        return self._send(key, size, content, outgoing)

    def _send(self, key: Key, size: int, content: object, outgoing: OutgoingAdapter) -> Adapter:
        """Keep an adapter that was checked, and let all ranks have it."""
        adapter = self._keep(key, size, content)
        self._ops.append((EXPECT, adapter.number, outgoing.rows))
        self._unsent[adapter.number] = deque(outgoing.pieces())
        return adapter

    def _outgoing(self, source: AdapterSource) -> OutgoingAdapter:
        """What all ranks get of an adapter."""
        return OutgoingAdapter.of(source.matrices(self._layout), self._layout.dtype)

    def prefetch(self) -> Iterator[tuple[int, OutgoingAdapter]]:
        """The adapters of all folders, as many as the host cache holds; no decision is to tell
        other ranks of them. For the start."""
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
        """Keep a new adapter, or a new version of one, that was checked."""
        self._make_room(key, size)
        self._retire(key)
        self._last_number += 1
        adapter = Adapter(number=self._last_number, key=key, size=size, content=content)
        self._by_key[key] = adapter
        self._on_host[adapter.number] = adapter
        self._host_bytes += size * self._element_bytes
        return adapter

    def knows(self, message: Submit) -> bool:
        """Whether it has an adapter of this id or name, of some version."""
        return _key(message.adapter_id, message.adapter or {}) in self._by_key

    def digest_of(self, task: int) -> bytes:
        """Of the weights that came with a request and are what this id means; empty if a
        folder's are, or none."""
        cached = self._by_key.get(task)
        content = b"" if cached is None else cached.content
        return content if isinstance(content, bytes) else b""

    def retire(self, task: int, given: dict[str, Any]) -> None:
        """Serve no more requests by this id or name with what is cached: another version,
        which found no room here, is what it means from now on."""
        self._retire(_key(task, given))

    def _retire(self, key: Key) -> None:
        replaced = self._by_key.pop(key, None)
        if replaced is not None:
            replaced.is_replaced = True
            if not self._is_wanted(replaced):
                self._drop(replaced)

    def _checked_size(self, source: AdapterSource) -> int:
        """Elements of an adapter's share on a rank, if it can be sent and both caches could
        hold it. Nothing is read for that."""
        source.check(self._layout, self._config.max_adapter_size)
        num_sent = 0
        for module, layer, rank in source.ranks:
            num_sent += rank * sum(self._layout.shape_of(module, layer) or ())
        if num_sent * self._element_bytes > _MOST_SENT_BYTES:
            raise AdapterFormatError(
                f"the adapter takes {num_sent * self._element_bytes} bytes in the model's "
                f"type, but at most {_MOST_SENT_BYTES} can be sent to all ranks. Serve one of "
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
        """Check that the model's type holds all numbers, which are read, with this content."""
        if content not in self._finite:
            check_values(source.matrices(self._layout), self._layout.dtype)
        if content:
            self._finite[content] = None
            self._finite.move_to_end(content)
            if len(self._finite) > _MOST_SEEN:
                self._finite.popitem(last=False)

    def _content_of_read(self, folder: Path, source: AdapterSource, content: object) -> object:
        """The content of what was read of a folder with this one: none that comes again if
        somebody wrote to it meanwhile. Then its numbers are those of nobody's look."""
        if self._folders.is_still(folder, content):
            return content
        self._finite.pop(content, None)
        check_values(source.matrices(self._layout), self._layout.dtype)
        return self._folders.unknown(folder)

    def _make_room(self, key: Key, size: int) -> None:
        """Forget adapters until the host has room for another one, or none if it has not."""
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
        # What has the same key is replaced in any case: it goes before others.
        for adapter in sorted(idle, key=lambda one: one.key != key):
            if self._host_bytes > limit or adapter.is_replaced:
                self._drop(adapter)

    def _is_wanted(self, adapter: Adapter) -> bool:
        """Whether a request needs it: then it stays on the host."""
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

    # ---- where the model runs ------------------------------------------------------------

    def is_ready(self, number: int) -> bool:
        """Whether this rank could load an adapter without a wait, as it can ever after. 0 is
        none."""
        if not number:
            return True
        adapter = self._on_host[number]
        if not adapter.was_packed:
            is_there = number not in self._unsent and self.is_packed(number)
            adapter.was_packed = adapter.slot >= 0 or is_there
        return adapter.was_packed

    def make_ready(self, number: int) -> bool:
        """Bring an adapter to where the model runs; False if those of running sequences
        leave no room. 0 is none."""
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
                # What steps in flight read stays until they are through: the load that
                # overwrites it comes after them.
                self._unload(other)
                first = self._allocator.take(adapter.size)
        if first is None:
            return False
        adapter.first, adapter.slot = first, self._free_slots.pop()
        self._on_device[adapter.number] = adapter
        self.num_loaded += 1
        for piece in self._unsent.pop(adapter.number, ()):
            self._ops.append((PIECE, adapter.number, piece))
        self._ops.append((LOAD, adapter.number, adapter.slot, first))
        return True

    def _unload(self, adapter: Adapter) -> None:
        self._allocator.give_back(adapter.first)
        self._free_slots.append(adapter.slot)
        adapter.slot = adapter.first = -1
        del self._on_device[adapter.number]

    # ---- what others are told ------------------------------------------------------------

    @property
    def has_ops(self) -> bool:
        """Whether ranks are to be told of anything."""
        return bool(self._ops or self._unsent)

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for an adapter that is being sent."""
        return bool(self._unsent) and self._is_awaited(self._most_urgent())

    def take_ops(self, room: int | None = None) -> list[AdapterOp]:
        """What ranks are to be told before the next step, and some pieces of adapters that
        nobody can start with yet, of ``room`` bytes, or as many as go ahead of any step."""
        ops, self._ops = self._ops, []
        room = PIECE_BYTES if room is None else room
        while self._unsent and room > 0:
            number = self._most_urgent()
            pieces = self._unsent[number]
            while pieces and room > 0:
                ops.append((PIECE, number, pieces.popleft()))
                room -= len(ops[-1][2])
            if not pieces:
                del self._unsent[number]
        return ops

    def _most_urgent(self) -> int:
        """Of the adapters that are being sent, the first that a request waits for, or else the
        first: after a restart there may be many that nobody needs yet."""
        first = next(iter(self._unsent))
        return next(filter(self._is_awaited, self._unsent), first)

    def _is_awaited(self, number: int) -> bool:
        adapter = self._on_host[number]
        # As a rule the first request is open, and the others need not be looked at.
        is_first_open = bool(adapter.requests) and self.is_open(adapter.requests[0])
        return is_first_open or self._is_wanted(adapter)

    @property
    def host_bytes(self) -> int:
        """Room of the host's cache."""
        return self._config.host_memory_bytes

    @property
    def num_on_host(self) -> int:
        """Adapters in the host's cache."""
        return len(self._on_host)

    @property
    def num_on_device(self) -> int:
        """Adapters where the model runs."""
        return len(self._on_device)

    @property
    def num_used(self) -> int:
        """Adapters of requests that are not over."""
        return sum(self._is_wanted(adapter) for adapter in self._on_host.values())


def _key(task: int, given: dict[str, Any]) -> Key:
    """What an adapter is asked for by."""
    name = given.get("name", "")
    return key_of(name) if name else task
