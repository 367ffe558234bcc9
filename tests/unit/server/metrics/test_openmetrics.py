"""The metrics in OpenMetrics, read by the strict parser of Prometheus's own client."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as strict_families,
)
from prometheus_client.parser import text_string_to_metric_families as text_families

from trimaran.server.metrics.openmetrics import (
    OPENMETRICS_TYPE,
    TEXT_TYPE,
    is_wanted,
    negotiated,
    of_text,
)

TEXT = rb"""# HELP requests Requests, of \\ all kinds
# TYPE requests counter
requests{model="a le=\"5\" b",le="x"} 3
# HELP lost_total Lost
# TYPE lost_total counter
lost_total 0
# HELP used Used
# TYPE used gauge
used{model="m"} 0.5
# HELP waits Waits
# TYPE waits histogram
waits_bucket{model="m",le="100"} 2
waits_bucket{model="m",le="+Inf"} 3
waits_count{model="m"} 3
waits_sum{model="m"} 412
# HELP spans Spans
# TYPE spans summary
spans_count 0
spans_sum 0
spans{quantile="0.5"} Nan
"""


def samples(families):
    """Every sample by its labels, without the name's suffix of counters."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = {
                name: str(float(value)) if family.type in ("histogram", "summary")
                and name in ("le", "quantile") else value
                for name, value in sample.labels.items()
            }  # fmt: skip
            name = sample.name.removesuffix("_total")
            found[(name, *sorted(labels.items()))] = str(sample.value)
    return found


def test_openmetrics_has_the_samples_of_the_text_format():
    made = of_text(TEXT).decode()
    assert made.endswith("# EOF\n")
    strict = list(strict_families(made))
    assert samples(strict) == samples(text_families(TEXT.decode()))
    assert [(family.name, family.type) for family in strict] == [
        ("requests", "counter"), ("lost", "counter"), ("used", "gauge"),
        ("waits", "histogram"), ("spans", "summary"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        ("application/openmetrics-text", True),
        ("Application/OpenMetrics-Text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=1.0.0,text/plain;q=0", True),
        # As Prometheus asks: it gets the text format with Triton's names of counters.
        (
            "application/openmetrics-text;version=1.0.0;q=0.6,text/plain;version=0.0.4;q=0.5,"
            "*/*;q=0.1",
            False,
        ),
        ("application/openmetrics-text;q=0", False),
        ("text/plain", False),
        ("*/*", False),
        ("", False),
    ],
)
def test_only_clients_that_take_no_text_get_openmetrics(accept, wanted):
    assert is_wanted(accept) == wanted
    body, content_type = negotiated(TEXT, accept)
    assert content_type == (OPENMETRICS_TYPE if wanted else TEXT_TYPE)
    assert body == (of_text(TEXT) if wanted else TEXT)
