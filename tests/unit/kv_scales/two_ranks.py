"""Two ranks of FSDP2 on different tokens. ``python -m tests.unit.kv_scales.two_ranks STORE`` is the second."""

import sys
from datetime import timedelta

import torch
import torch.distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from rollout_service.kv_scales import KVScales
from rollout_service.kv_scales.observer import observe_qkv
from tests.unit.kv_scales.small import small_model, tokens


def scales_of(rank: int, store: str) -> KVScales:
    """What a rank gets from a training step on tokens of its own."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=120)
    )
    try:
        model = sharded(small_model("qwen3"))
        with observe_qkv(model) as observation:
            model(tokens(rank), use_cache=False).logits.float().square().mean().backward()
        return observation.scales()
    finally:
        torch.distributed.destroy_process_group()


def sharded(model: PreTrainedModel) -> PreTrainedModel:
    """By FSDP2: every attention and every decoder layer, and the rest."""
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer.self_attn, mesh=mesh)
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(scales_of(1, sys.argv[1]).model_dump_json())
