"""A trainer that publishes by ModelExpress 0.7.0's writer, which the object store of this file puts into a folder.

python -m tests.clients.modelexpress_writer FOLDER MODEL
"""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from modelexpress_rl import refit_pb2
from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
from modelexpress_rl.version import WeightVersionRef
from safetensors.torch import load_file

from tests.support.delta_writer import Weights, raw, stepped

PREFIX = "s3://bucket/run"
VERSIONS = (("v-a", False), ("v-b", False), ("v-whole", True), ("v-d", False))
"""The name of each version, and whether it is whole."""


def main(folder: Path, model: Path) -> None:
    """Publish ``VERSIONS``, each a step after the one before."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights: Weights = load_file(model / "model.safetensors")
    base = {name: raw(tensor) for name, tensor in weights.items()}
    known: dict[str, Any] = {}

    def put(uri: str, data: bytes) -> None:
        path = folder / uri.removeprefix(f"{PREFIX}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def answer(request: Any, timeout: float) -> Any:
        return SimpleNamespace(version=known[request.uid], HasField=lambda _: True)

    writer = _writer(base, SimpleNamespace(GetWeightVersion=answer), put)
    writer.prepare_base(hf_tensor_iter=_buckets(weights))
    before = "base"
    for number, (name, whole) in enumerate(VERSIONS, 1):
        weights = stepped(weights, number)
        known[name] = _announced(name, None if whole else before)
        version = WeightVersionRef(version_id=name)
        writer.publish(version=version, staged=writer.stage(version=version, hf_tensor_iter=_buckets(weights)))
        before = name


def _writer(
    base: dict[str, np.ndarray[Any, Any]], service: SimpleNamespace, put: Callable[..., None]
) -> CanonicalDeltaPublicationMethod:
    return CanonicalDeltaPublicationMethod(
        config=SimpleNamespace(uri_prefix=PREFIX, initial_base_version_id="base"),
        model_name="model",
        service=lambda: service,
        rpc_timeout_seconds=1.0,
        process_group=dist.group.WORLD,
        read_seed_tensor=base.__getitem__,
        s3=SimpleNamespace(put=put, close=lambda: None),
    )


def _announced(name: str, base: str | None) -> Any:
    place = refit_pb2.ObjectStorageSource(
        storage_type=refit_pb2.OBJECT_STORAGE_TYPE_S3, uri=f"{PREFIX}/{name}/model.safetensors.index.json"
    )
    whole, delta = refit_pb2.WEIGHT_PAYLOAD_FORMAT_FULL_HF_CHECKPOINT, refit_pb2.WEIGHT_PAYLOAD_FORMAT_XOR_DELTA
    return refit_pb2.WeightVersion(
        uid=name,
        model_name="model",
        payload_format=whole if base is None else delta,
        object_storage=place,
        **({} if base is None else {"base_version_id": base}),
    )


def _buckets(weights: Weights) -> Iterator[list[tuple[str, torch.Tensor]]]:
    return ([item] for item in weights.items())


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
