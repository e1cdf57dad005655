"""Choose the safetensors files of a checkpoint that hold its weights. Needs neither torch nor huggingface_hub."""

import json
from collections.abc import Collection, Iterable
from pathlib import PurePath

INDEX_FILE = "model.safetensors.index.json"
"""Lists the file of each tensor, if there are several files."""
SINGLE_FILE = "model.safetensors"
OTHER_FORMAT = "consolidated"
"""Prefix of files that hold the same weights under Mistral's own names."""


def weight_files(there: Collection[str], index: bytes | None) -> list[str]:
    """Return the names of the files that hold the weights, sorted; empty if there is none.

    Args:
        there: names of all files of the folder or the repository.
        index: content of ``INDEX_FILE``; only its files count. None: there is no such file.

    Raises ValueError for an index that cannot be read, or with the names of the files that are missing.
    """
    found = sorted(name for name in there if name.endswith(".safetensors") and "/" not in name)
    if index is None:
        if SINGLE_FILE in found:
            return [SINGLE_FILE]  # others are an adapter, another precision, or the same under other names
        return [name for name in found if not name.startswith(OTHER_FORMAT)] or found
    listed = listed_files(index)
    missing = [name for name in listed if name not in there]
    if len(missing) == len(listed) and SINGLE_FILE in found:
        return [SINGLE_FILE]  # save_pretrained removes the shards of an earlier save, but not their index
    if missing:
        raise ValueError(
            f"{len(missing)} of the {len(listed)} files that {INDEX_FILE} names are missing: {', '.join(missing[:4])}; "
            "copy or download them again"
        )
    return listed


def listed_files(index: bytes) -> list[str]:
    """Return the names of the files in an index, sorted. Raises ValueError for an index that cannot be read."""
    try:
        names = json.loads(index)["weight_map"].values()
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{INDEX_FILE} is no index of safetensors: {error!r}; copy or download it again") from error
    return distinct_files(names)


def distinct_files(names: Iterable[object]) -> list[str]:
    """Return the distinct files that an index gives its tensors, sorted. Raises ValueError for one outside of the
    folder, or if there is none."""
    files = sorted({str(name) for name in names})
    if not files:
        raise ValueError(f"{INDEX_FILE} names no file; copy or download it again")
    if outside := [name for name in files if PurePath(name).name != name]:
        raise ValueError(
            f"{INDEX_FILE} names a file outside of its folder: {outside[0]}; put all files into one folder"
        )
    return files
