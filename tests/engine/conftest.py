"""What several files share: each engine takes half a minute to start."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.one_engine import OneEngine, running


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def llama_with_fp8_cache(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OneEngine]:
    """A Llama in BF16 with an FP8 cache, whose tests leave it open but for the last."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("llama")
        async with running("llama", folder, monkeypatch, quant="none", kv_cache_dtype="fp8_e4m3") as one:
            yield one
