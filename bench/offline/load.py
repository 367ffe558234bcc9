"""A load of random requests: number and lengths."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Requests that share no prefix and do not end early."""

    isl: int
    osl: int
    requests: int
    temperature: float = 1.0

    @classmethod
    def parse(cls, text: str, temperature: float) -> Load:
        """Parse ``ISL/OSLxREQUESTS``; raises ConfigError."""
        try:
            lengths, requests = text.split("x")
            isl, osl = lengths.split("/")
            load = cls(
                isl=int(isl), osl=int(osl), requests=int(requests), temperature=temperature
            )
        except ValueError:
            raise ConfigError(f"{text!r} is not a load such as 128/128x64") from None
        if min(load.isl, load.osl, load.requests) < 1:
            raise ConfigError(f"{text!r}: lengths and requests start at 1")
        return load

    def __str__(self) -> str:
        return f"{self.isl}/{self.osl}x{self.requests}"
