"""``serve run`` starts Ray by itself, and ends with it; the tests of tests/service start theirs by it, too."""

from collections.abc import Iterator

import httpx
import pytest

from rollout_service.config.deployment_file import CPU, read_document
from tests.support.processes import gone
from tests.support.serve_run import ServeRun, serve_run


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeRun]:
    """The shipped CPU deployment in an empty folder."""
    with serve_run(read_document(CPU), tmp_path_factory.mktemp("serve-run")) as run:
        yield run


def test_serve_run_makes_its_model_and_serves(served):
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "1+1=", "max_tokens": 4}, timeout=60)
    assert answer.status_code == 200
    assert (served.output.parent / "models/tiny-qwen3/model.safetensors").is_file()


async def test_ctrl_c_ends_serve_run_and_leaves_nothing(served):
    assert served.interrupt() == 0
    assert await gone(served.mark) == []
