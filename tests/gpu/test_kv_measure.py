"""The service's own measuring of KV scales beside CUDA graphs and compiled code: as tests/engine on the CPU."""

import torch

from rollout_service.kv_scales import scales_from_amax
from tests.engine.test_kv_measure import AGREE, BATCH, CALIBRATED_MEAN, measured_by_a_trainer, require_alike
from tests.support.key_channels import loud_weights
from tests.support.one_engine import mean_difference, running


async def test_a_compiled_engine_measures_and_uses_correct_kv_scales(tmp_path, monkeypatch):
    settings = {"gpu_memory_utilization": 0.1, "cuda_graph_sizes": (1, 8, 16)}
    async with running("llama", tmp_path, monkeypatch, kv_cache_dtype="fp8_e4m3", **settings) as one:
        weights = loud_weights(one.config.model.path, seed=1)
        folder = await one.update(1, weights)
        before = await one.logprobs([tuple(BATCH[0])])
        ranks = await one.measured(BATCH)
        assert torch.equal(await one.logprobs([tuple(BATCH[0])]), before)

        # FP8 weights and activations on one side: 3% on the CPU
        require_alike([rank.amax for rank in ranks], measured_by_a_trainer(one, folder), 4 * AGREE)

        rounded = scales_from_amax([rank.amax for rank in ranks]).named()
        folder = await one.update(2, weights, rounded)
        assert await mean_difference(one, folder, fp8=True) < 2 * CALIBRATED_MEAN
