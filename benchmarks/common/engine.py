"""A vLLM engine without a service, as a replica would start it, and versions for it to load."""

import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from rollout_service.config import ServiceConfig
from rollout_service.engine.adapter import EngineAdapter
from rollout_service.engine.args import engine_args, not_converted
from rollout_service.engine.environment import engine_environment
from rollout_service.engine.plugin import register
from rollout_service.ingest.ingest import Ingest
from rollout_service.model.served_model import ServedModel
from rollout_service.protocol.upload import BeginUpload, CommitUpload


@asynccontextmanager
async def bare_engine(
    config: ServiceConfig,
    *,
    environment: Mapping[str, str] | None = None,
    arguments: Mapping[str, object] | None = None,
) -> AsyncIterator[EngineAdapter]:
    """The engine of ``config`` in this process, with dummy weights, until the block ends."""
    os.environ.update(engine_environment(config) | dict(environment or {}))  # noqa: TID251 - the engine inherits it
    register()
    model = ServedModel.load(config.model.path)
    args = engine_args(config, not_converted(model, model.plan(config.quant)), has_tokenizer=False)
    engine = EngineAdapter(replace(args, **dict(arguments or {})), exports=False)
    try:
        await engine.connect()
        yield engine
    finally:
        engine.shutdown()


async def commit(config: ServiceConfig, *uploads: BeginUpload) -> int:
    """Have the log of ``config`` hold the model as version 0, then these. Returns the newest version."""
    ingest = Ingest(config)
    await ingest.start()
    for upload in uploads:
        await ingest.begin(upload)
        await ingest.commit(upload.version, CommitUpload())
    await ingest.stop()
    return uploads[-1].version if uploads else 0


async def load_version(engine: EngineAdapter, folder: Path, version: int) -> tuple[float, float]:
    """Have the engine serve the version in ``folder``, staged before it is paused, as a replica does it.

    Returns the seconds from the pause until the engine runs again, and those of the load alone.
    """
    await engine.stage(folder)
    paused = time.perf_counter()
    await engine.pause("keep")
    load_s = await engine.load(folder, version)
    await engine.resume()
    return time.perf_counter() - paused, load_s
