"""The latency metrics that the operator chose."""

from __future__ import annotations

from dataclasses import dataclass

from trimaran.comm.errors import ConfigError
from trimaran.server.metrics.backend_samples import NEWEST, OLDEST

_BACKEND_VERSION = "trtllm_version"
_QUANTILES = (0.5, 0.9, 0.95, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class MetricsOptions:
    """Which latency metrics exist (``--metrics-config``)."""

    has_counters: bool = True
    has_histograms: bool = False
    has_summaries: bool = False
    quantiles: tuple[float, ...] = _QUANTILES
    backend_minor: int | None = None
    """Samples of ``nv_trt_llm_*`` as version 0.N of Triton's TensorRT-LLM backend has them;
    None: the version of the repository.
    """

    @classmethod
    def parse(cls, values: dict[str, str]) -> MetricsOptions:
        """Read the ``--metrics-config`` keys.

        Raises:
            ConfigError: an unknown key, or a malformed value.
        """
        known = ("counter_latencies", "histogram_latencies", "summary_latencies")
        for name, value in values.items():
            if name not in (*known, "summary_quantiles", _BACKEND_VERSION):
                raise ConfigError(
                    f"--metrics-config {name}={value}: known keys are {', '.join(known)}, "
                    f"summary_quantiles and {_BACKEND_VERSION}"
                )
            if name in known and value not in ("true", "false"):
                raise ConfigError(f"--metrics-config {name}={value}: must be true or false")
        return cls(
            has_counters=values.get("counter_latencies", "true") == "true",
            has_histograms=values.get("histogram_latencies") == "true",
            has_summaries=values.get("summary_latencies") == "true",
            quantiles=_quantiles(values.get("summary_quantiles")) or _QUANTILES,
            backend_minor=_backend_minor(values.get(_BACKEND_VERSION)),
        )


def _backend_minor(text: str | None) -> int | None:
    if text is None:
        return None
    known = {f"0.{minor}": minor for minor in range(OLDEST, NEWEST + 1)}
    if text not in known:
        raise ConfigError(
            f"--metrics-config {_BACKEND_VERSION}={text}: must be a version from 0.{OLDEST} to "
            f"0.{NEWEST}; leave it out to show the samples of the repository's version"
        )
    return known[text]


def _quantiles(text: str | None) -> tuple[float, ...]:
    if not text:
        return ()
    try:
        found = tuple(float(pair.split(":")[0]) for pair in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--metrics-config summary_quantiles={text}: must look like 0.5:0.05,0.9:0.01"
        ) from None
    # Negated, so that NaN is refused too.
    wrong = [quantile for quantile in found if not 0 <= quantile <= 1]
    if wrong:
        raise ConfigError(
            f"--metrics-config summary_quantiles={text}: {wrong[0]:g} is no quantile; each "
            "must be from 0 to 1"
        )
    # Compared as shown: two series with one name would break the exposition format.
    if len({f"{quantile:g}" for quantile in found}) < len(found):
        raise ConfigError(
            f"--metrics-config summary_quantiles={text}: names a quantile twice; name each once"
        )
    return found
