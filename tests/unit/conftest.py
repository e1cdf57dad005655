"""What tests of several packages share."""

from collections.abc import Iterator

import pytest
import ray


@pytest.fixture(scope="module")
def object_store() -> Iterator[None]:
    """Ray on this machine, of which this process is the driver."""
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=256 << 20)
    yield
    ray.shutdown()
