"""Compares weights with the checksums of their build while they are loaded."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import local

import xxhash

from trimaran.comm.errors import ConfigError
from trimaran.worker.config.host_limits import usable_cores
from trimaran.worker.config.shard_file import CHUNK_BYTES, checksum_of, read_header

logger = logging.getLogger(__name__)

_MAX_THREADS = 8


class ShardVerifier:
    """Compares a weight file with the checksums in its header, in any number of threads.

    Files of earlier versions have a SHA-256 of each tensor instead of checksums of chunks.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ConfigError: the file is not whole.
        """
        self.path = path
        header = read_header(path)
        self.entries = header.entries
        self._chunks, self._checksums = header.chunks, header.checksums
        self.has_chunks = self._chunks.keys() == self.entries.keys()
        """Whether each chunk has a checksum, so that `check` can be called."""
        self.has_checksums = self.has_chunks or self._checksums.keys() == self.entries.keys()
        """Whether the file can be compared at all."""

    def check(self, name: str, offset: int, chunk: memoryview) -> None:
        """Compare one chunk, which begins ``offset`` bytes into its tensor.

        Raises:
            ConfigError: the chunk differs from the build.
        """
        if xxhash.xxh3_128_digest(chunk) != self._chunks[name][offset // CHUNK_BYTES]:
            last = offset + len(chunk) - 1
            raise self._differs(f"bytes {offset} to {last} of the tensor {name!r}")

    def check_tensor(self, name: str) -> None:
        """Read a tensor and compare its SHA-256.

        Raises:
            ConfigError: the tensor differs from the build, or cannot be read.
        """
        entry = self.entries[name]
        try:
            found = checksum_of(self.path, entry.start, entry.num_bytes)
        except OSError as error:
            raise self.unreadable(error) from None
        if found != self._checksums[name]:
            raise self._differs(f"bytes 0 to {entry.num_bytes - 1} of the tensor {name!r}")

    def unreadable(self, error: OSError) -> ConfigError:
        """The error of a file that cannot be read."""
        return ConfigError(f"{self.path}: cannot be read: {error.strerror or error}.")

    def _differs(self, where: str) -> ConfigError:
        return ConfigError(
            f"{self.path}: {where} are not as they were built. Copy the file again, or build "
            f"the folder again; then check the disk. `trimaran verify --engine "
            f"{self.path.parent}` names all tensors that differ, and "
            "--skip-weight-verification serves the weights as they are."
        )


class BackgroundVerification:
    """Reads and compares a whole file in threads, while the model is being made of it."""

    def __init__(self, verifier: ShardVerifier, num_threads: int = 0) -> None:
        """Start. ``num_threads`` 0 means one a core, up to 8."""
        self._verifier = verifier
        self._began = time.monotonic()
        self._num_bytes = sum(entry.num_bytes for entry in verifier.entries.values())
        num_threads = num_threads or min(_MAX_THREADS, usable_cores())
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="checksums")
        self._local = local()
        self._file = os.open(verifier.path, os.O_RDONLY)
        self._results: list[Future[None]] = []
        for name, entry in verifier.entries.items():
            if not verifier.has_chunks:
                self._results.append(self._pool.submit(verifier.check_tensor, name))
                continue
            for offset in range(0, entry.num_bytes, CHUNK_BYTES):
                num_bytes = min(CHUNK_BYTES, entry.num_bytes - offset)
                self._results.append(
                    self._pool.submit(self._check, name, offset, entry.start, num_bytes)
                )

    def _check(self, name: str, offset: int, start: int, num_bytes: int) -> None:
        memory: memoryview | None = getattr(self._local, "memory", None)
        if memory is None:
            # Read rather than mapped: faults of pages cost more than the copy.
            memory = self._local.memory = memoryview(bytearray(CHUNK_BYTES))
        chunk = memory[:num_bytes]
        try:
            read_whole(self._file, start + offset, chunk)
        except OSError as error:
            raise self._verifier.unreadable(error) from None
        self._verifier.check(name, offset, chunk)

    def finish(self) -> None:
        """Wait for the end.

        Raises:
            ConfigError: the file differs from its build.
        """
        try:
            for result in self._results:
                result.result()
        finally:
            self.close()
        logger.info(
            "%s: %.2f GiB are as they were built (%s), compared in %.1f s",
            self._verifier.path.name,
            self._num_bytes / 2**30,
            "XXH3" if self._verifier.has_chunks else "SHA-256: an earlier version built it",
            time.monotonic() - self._began,
        )

    def close(self) -> None:
        """Give up what is not compared yet."""
        self._pool.shutdown(cancel_futures=True)
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_whole(file: int, start: int, piece: memoryview) -> None:
    """Fill ``piece`` with a file's bytes; raises OSError if there are too few."""
    done = 0
    while done < len(piece):
        count = os.preadv(file, [piece[done:]], start + done)
        if count == 0:
            raise OSError(f"the file ends {len(piece) - done} bytes early")
        done += count
