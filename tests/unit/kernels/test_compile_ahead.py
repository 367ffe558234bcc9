"""Compiling beside a model's load: side by side, and only what its products use."""

import threading

from trimaran.kernels.compile_ahead import run_beside
from trimaran.kernels.tables.product_table import ProductTable


def test_compile_jobs_run_in_the_background_and_a_failed_job_stops_no_other():
    may_end, has_ended = threading.Event(), threading.Event()

    def fail() -> None:
        may_end.wait(60)
        raise RuntimeError("refused")

    run_beside([fail, has_ended.set])
    assert not may_end.is_set()
    may_end.set()
    assert has_ended.wait(60)


def test_a_table_lists_its_products():
    table = ProductTable.of_device("NVIDIA H200")
    weights = table.weights()
    assert (4096, 14336, "parts") in weights
    assert all(table.choices(*weight) for weight in weights)
