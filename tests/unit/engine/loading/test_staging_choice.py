"""Which staging area ``engine.staging: auto`` takes."""

import pytest

from rollout_service.engine.loading.staging_choice import choose

GB = 10**9


@pytest.mark.parametrize(
    ("what", "area", "cache", "host", "ranks", "kind"),
    [
        ("Qwen3-8B on 141 GB", 9.4, 117, 100, 1, "device"),
        ("Qwen3-8B on 80 GB", 9.4, 62, 100, 1, "device"),
        ("Qwen3-30B-A3B on 141 GB", 31.2, 86, 100, 1, "device"),
        ("Qwen3-30B-A3B on 80 GB", 31.2, 41, 100, 1, "host"),
        ("on two GPUs of 80 GB, each has half", 15.6, 56, 100, 2, "device"),
        ("a machine without the memory", 31.2, 41, 30, 1, "none"),
        ("nor for two ranks", 31.2, 56, 62, 2, "none"),
        ("weights that leave no cache", 70, -1, 100, 1, "host"),
    ],
)
def test_the_gpu_only_where_it_costs_little(what, area, cache, host, ranks, kind):
    assert choose(int(area * GB), int(cache * GB), int(host * GB), ranks).kind == kind, what


def test_the_log_says_what_each_would_cost():
    assert str(choose(int(31.2 * GB), 41 * GB, 100 * GB, 1)) == (
        "engine.staging auto is host (device: 31.2 GB, 76% of the KV cache's 41.0 GB; "
        "host: updates close the engine for 0.62 s)"
    )
    assert str(choose(int(31.2 * GB), 41 * GB, 20 * GB, 1)) == (
        "engine.staging auto is none (device: 31.2 GB, 76% of the KV cache's 41.0 GB; "
        "host: 31.2 GB of memory for each GPU of an engine, and 20.0 GB are free)"
    )
