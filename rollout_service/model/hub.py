"""Models of the Hugging Face hub: the commit of a revision, and a repository's files on this node.

huggingface_hub downloads everything into its cache. Each process uses its own ``HF_HOME``, ``HF_TOKEN``,
``HF_ENDPOINT`` and ``HF_HUB_OFFLINE``; in a cluster, these are set where Ray was started on the node. All processes of
a node share the cache.
"""

import errno
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import huggingface_hub as hf
from huggingface_hub import constants, errors
from huggingface_hub.utils.tqdm import tqdm

from rollout_service.config import ModelConfig, ServiceConfig
from rollout_service.model.weight_files import INDEX_FILE, listed_files, weight_files

logger = logging.getLogger(__name__)

VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "tekken.json",
    "*.model",
    "*.model.v[0-9]*",
    "*.tiktoken",
    "*.spm",
    "*.bpe",
    "bpe.codes",
)
"""Files of which transformers or vLLM can load a tokenizer; its class knows which further files it needs."""
SMALL_FILES = ("*.json", "*.jinja", "*.txt", *VOCABULARIES)
"""The configuration, the tokenizer's files and the index of the weights: every node needs them."""
IN_SUBFOLDERS = "*/*"
"""Files in subfolders: other formats of the same model, which are not needed."""
LOG_EVERY_S = 5.0
"""Interval in seconds of log messages about a download's progress, without a terminal."""
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_WHY = (
    (
        errors.GatedRepoError,
        "{repo} is gated: ask for access at {hub}/{repo}, and set HF_TOKEN to a token of that account where Ray is "
        "started",
    ),
    (
        errors.RepositoryNotFoundError,
        "model.path={repo} is no folder in {cwd}, and {hub} shows no repository of that name: correct it, or set "
        "HF_TOKEN where Ray is started if the repository is private",
    ),
    (errors.HFValidationError, "model.path={repo} is no folder in {cwd}, and cannot be a repository on {hub}"),
    (
        errors.RevisionNotFoundError,
        "{repo} has no revision {revision}: set model.revision to a branch, a tag or a commit of it",
    ),
    (errors.RemoteEntryNotFoundError, "{repo} at {revision} is no model to serve: it lacks a file"),
    (
        (errors.RevisionResolutionError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled),
        "{repo} at {revision} is not, or not all, in {cache} on {node}, and {hub} cannot be reached from there: "
        "connect the node, copy the cache of another one to it, or name a folder in model.path",
    ),
    (
        (errors.HfHubHTTPError, httpx2.HTTPError, OSError),
        "{repo} at {revision} could not be downloaded from {hub} to {cache} on {node}; if it is private, set HF_TOKEN "
        "where Ray is started",
    ),
)
"""Errors of huggingface_hub → message; the first match is used."""


class ModelNotDownloaded(OSError):
    """Raised if a repository's files cannot be obtained; has the reason, and what to do."""


def pinned(config: ServiceConfig) -> ServiceConfig:
    """Return the configuration with ``model.revision`` set to a commit hash, so that all processes have the same files.

    A model in a folder is unchanged. The small files of a repository are downloaded, which also tests access. If the
    hub cannot be reached, the cache's commit for that revision is used. Raises ModelNotDownloaded.
    """
    repo_id = config.model.repo_id
    if repo_id is None:
        return config
    with _explain_errors(config.model):
        commit = hf.HfApi().resolve_revision(repo_id, revision=config.model.revision).resolved
    model = config.model.model_copy(update={"revision": commit})
    folder = _download(model, commit, SMALL_FILES)
    if sizes := _sizes(repo_id, commit):
        _weight_files(model, folder, sizes)
    logger.info("%s: commit %s", repo_id, commit)
    return config.model_copy(update={"model": model})


def with_model_here(config: ServiceConfig, *, weights: bool = False) -> ServiceConfig:
    """Return the configuration with ``model.path`` set to a folder of this node. ``weights``: download the safetensors,
    too.

    ``model.revision`` stays the commit, and ``model.name`` is unchanged. A model in a folder is unchanged, except for
    environment variables in its path. Blocks during a download. Raises ModelNotDownloaded, or ValueError for an
    undefined variable.
    """
    model = config.model.here()
    if model.repo_id is None:
        return config if model is config.model else config.model_copy(update={"model": model})
    folder = model_folder(model, weights=weights)
    here = model.model_copy(update={"path": folder, "served_name": model.name})
    return config.model_copy(update={"model": here})


def model_folder(model: ModelConfig, *, weights: bool = False) -> Path:
    """Return a pinned repository's folder in this node's cache, downloading it if necessary. Raises
    ModelNotDownloaded."""
    assert model.repo_id is not None and model.revision is not None, f"{model.path} was not pinned"
    folder = _download(model, model.revision, SMALL_FILES)
    if weights:
        files, lacking, nbytes = _missing_files(model, folder)
        _require_free(model, nbytes)
        if lacking:
            logger.info("%s: downloading %d files, %s", model.repo_id, len(lacking), _size(nbytes))
        _download(model, model.revision, tuple(files), nbytes)
        if gone := [name for name in files if not (folder / name).is_file()]:
            raise ModelNotDownloaded(
                f"{model.repo_id} at {model.revision} lacks what its {constants.SAFETENSORS_INDEX_FILE} names: "
                f"{', '.join(gone[:4])}"
            )
    return folder


def require_room(model: ModelConfig) -> None:
    """Raise ModelNotDownloaded if a pinned repository's weights do not fit into this node's cache."""
    if model.repo_id is not None:
        _require_free(model, _missing_files(model, model_folder(model))[2])


def config_file(model: ModelConfig) -> Path:
    """Download and return only config.json of a repository. Raises ModelNotDownloaded."""
    assert model.repo_id is not None, f"{model.path} is a folder"
    with _explain_errors(model):
        return Path(hf.hf_hub_download(model.repo_id, constants.CONFIG_NAME, revision=model.revision))


def _download(model: ModelConfig, commit: str, patterns: tuple[str, ...], nbytes: int = 0) -> Path:
    assert model.repo_id is not None
    bars = None if sys.stderr.isatty() else _log_progress(model.repo_id, nbytes)
    with _explain_errors(model):
        folder = hf.snapshot_download(
            model.repo_id,
            revision=commit,
            allow_patterns=list(patterns),
            ignore_patterns=[IN_SUBFOLDERS],
            tqdm_class=bars,
        )
    if not (Path(folder) / constants.CONFIG_NAME).is_file():
        raise ModelNotDownloaded(f"{model.repo_id} at {commit} has no {constants.CONFIG_NAME}: it is no model to serve")
    if not folder.isascii():
        raise ModelNotDownloaded(
            f"{constants.HF_HUB_CACHE} on {os.uname().nodename} has characters beyond ASCII, with which engines do not "
            "start: set HF_HOME to another folder where Ray is started"
        )
    return Path(folder)


def _sizes(repo_id: str, commit: str) -> dict[str, int]:
    """Return the size in bytes of each file of the repository; empty if an older huggingface_hub filled the cache."""
    try:
        return {file.path: file.size for file in hf.get_cached_repo_tree(repo_id, revision=commit)}
    except errors.CachedRepoTreeNotFoundError:
        return {}


def _weight_files(model: ModelConfig, folder: Path, sizes: dict[str, int]) -> list[str]:
    """Return the files that ``weight_files`` selects, downloaded or not."""
    index, there = folder / INDEX_FILE, {*sizes, *(path.name for path in folder.iterdir())}
    listed = index.read_bytes() if index.is_file() else None
    try:
        if listed is not None and not sizes:  # the repository's file list is unknown, only the cached files are known
            return listed_files(listed)
        found = weight_files(there, listed)
    except ValueError as error:
        raise ModelNotDownloaded(f"{model.repo_id} at {model.revision}: {error}") from error
    if not found and not sizes:
        raise ModelNotDownloaded(
            f"the weights of {model.repo_id} at {model.revision} are not in {constants.HF_HUB_CACHE} on "
            f"{os.uname().nodename}, and {constants.ENDPOINT} cannot be reached from there"
        )
    if not found:
        pickles = sorted(name for name in there if name.endswith((".bin", ".pth", ".pt")))
        held = f"but {', '.join(pickles[:4])}: pickles are never opened" if pickles else "none at all"
        raise ModelNotDownloaded(
            f"{model.repo_id} at {model.revision} has no weights in safetensors, {held}. Name a repository or a "
            "revision that has them (bots often put them into a pull request: model.revision: refs/pr/N)"
        )
    return found


def _missing_files(model: ModelConfig, folder: Path) -> tuple[list[str], list[str], int]:
    """Return the files of the weights, those that are missing here, and the size of these in bytes; 0 if unknown."""
    assert model.repo_id is not None and model.revision is not None
    sizes = _sizes(model.repo_id, model.revision)
    files = _weight_files(model, folder, sizes)
    lacking = [name for name in files if not (folder / name).is_file()]
    return files, lacking, sum(sizes.get(name, 0) for name in lacking)


def _require_free(model: ModelConfig, nbytes: int) -> None:
    cache = Path(constants.HF_HUB_CACHE)
    free = shutil.disk_usage(next(place for place in (cache, *cache.parents) if place.exists())).free
    if nbytes > free:
        raise ModelNotDownloaded(
            f"{model.repo_id} needs {_size(nbytes)} more in {constants.HF_HUB_CACHE}, and {_size(free)} are free "
            f"there on {os.uname().nodename}: make room, or set HF_HOME to a larger disk"
        )


@contextmanager
def _explain_errors(model: ModelConfig) -> Iterator[None]:
    """Raise ModelNotDownloaded for errors of huggingface_hub, with advice."""
    facts = {
        "repo": model.path,
        "revision": model.revision or constants.DEFAULT_REVISION,
        "hub": constants.ENDPOINT,
        "cache": constants.HF_HUB_CACHE,
        "node": os.uname().nodename,
        "cwd": Path.cwd(),
    }
    try:
        yield
    except (OSError, errors.RevisionResolutionError, errors.HFValidationError, httpx2.HTTPError) as error:
        if isinstance(error, ModelNotDownloaded):
            raise
        if isinstance(error, OSError) and error.errno in _DISK_FULL:
            why = "the disk of {cache} on {node} is full: make room, or set HF_HOME to a larger one"
        else:
            why = next(why for kinds, why in _WHY if isinstance(error, kinds))
        said = textwrap.shorten(f"{type(error).__name__}: {error}", 400, placeholder=" …")
        raise ModelNotDownloaded(f"{why.format(**facts)} ({said})") from error


def _log_progress(what: str, nbytes: int) -> type[tqdm]:
    """Return a class of progress bars that log the downloaded bytes, every ``LOG_EVERY_S`` seconds at most.

    huggingface_hub makes several bars for one download. Two of them count bytes: received ones and written ones.
    """
    next_at, most, told = time.monotonic() + LOG_EVERY_S, 0, 0

    class LoggedBar(tqdm):
        def __init__(self, *args: object, **kwargs: object) -> None:
            kwargs |= {"disable": False, "leave": False, "mininterval": LOG_EVERY_S / 10}
            super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            """Log the progress instead of drawing the bar."""
            nonlocal next_at, most, told
            if self.unit != "B":
                return
            most = max(most, int(self.n))
            if most > told and time.monotonic() >= next_at:  # also called at the end of a bar
                next_at, told = time.monotonic() + LOG_EVERY_S, most
                of = f" of {_size(nbytes)}" if nbytes else ""
                logger.info("%s: %s%s downloaded", what, _size(most), of)

    return LoggedBar


def _size(nbytes: int) -> str:
    """Format a size with three digits in decimal units."""
    return str(tqdm.format_sizeof(nbytes, "B"))
