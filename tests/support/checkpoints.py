"""Folders of weights, as trainers write them."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def save_checkpoint(folder: Path, weights: Mapping[str, torch.Tensor]) -> Path:
    """Hugging Face's layout with an index over two files, as trainers write it."""
    folder.mkdir()
    names = sorted(weights)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in weights.values())},
        "weight_map": {name: file for file, held in files.items() for name in held},
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
