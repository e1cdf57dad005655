"""What a real engine computes with, seen from inside its worker process; only digests and scales are returned."""

from pathlib import Path
from typing import Any

import torch
import xxhash
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

from rollout_service.compat.vllm_internals import BaseLayerWithLoRA
from rollout_service.engine.cpu.experts import CpuExperts
from rollout_service.engine.cpu.linear import CpuLinearMethod
from rollout_service.engine.kernels import block_quant
from rollout_service.engine.loading.copy_plan import in_memory_order
from rollout_service.engine.worker import VersionStaging
from rollout_service.kv_scales.worker import held_scales
from rollout_service.quant.formats import WEIGHT_FORMATS

DECODED = ".decoded"
"""Appended to a parameter's name for the fp32 weights that are multiplied with."""


class Probe(VersionStaging):
    """For vLLM's ``worker_extension_cls``: its methods become the worker's, for ``collective_rpc``."""

    def weight_digests(self) -> dict[str, str]:
        """xxh3-128 of every parameter's bytes, and of what every layer really multiplies with."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        digests = {name: digest(in_memory_order(parameter.data)) for name, parameter in model.named_parameters()}
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, UnquantizedLinearMethod) or isinstance(module, ParallelLMHead):
                digests[f"{name}.weight"] = digest(_multiplied_with(module))
            if isinstance(method, CpuLinearMethod):
                digests[f"{name}.weight{DECODED}"] = digest(method.weight)
            if isinstance(method, CpuExperts):
                digests[f"{name}.w13_weight{DECODED}"] = digest(method.w13)
                digests[f"{name}.w2_weight{DECODED}"] = digest(method.w2)
            config = getattr(method, "moe_quant_config", None)
            # the scales that an expert kernel reads; named_parameters() has those that it should read
            for weight in ("w13", "w2") if config is not None else ():
                scale = config.w1_scale if weight == "w13" else config.w2_scale
                if scale is not None:
                    digests[f"{name}.{weight}_weight{_scale_suffix(module)}"] = digest(scale)
        return digests

    def kv_scales(self) -> dict[str, list[float]]:
        """Every copy of the scales of every attention layer, by the names that a checkpoint has."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        return {
            f"{name.removesuffix('.attn')}.{x}_scale": copies
            for name, module in model.named_modules()
            if isinstance(module, Attention)
            for x, copies in held_scales(module).items()
        }

    def expert_ids(self) -> dict[str, list[int]]:
        """Which routed experts of each layer this rank has."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's
        return {
            name: module.expert_map_manager.get_local_expert_ids()
            for name, module in model.named_modules()
            if isinstance(module, RoutedExperts)
        }

    def save_adapted(self, folder: str) -> None:
        """Save the input and the output of each layer with adapters in the next step, as ``folder/NAME.pt``."""
        model: torch.nn.Module = self.get_model()  # type: ignore[attr-defined]  # the worker's

        def save_once(path: Path, module: torch.nn.Module) -> None:
            def hook(_: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
                torch.save((inputs[0], output[0] if isinstance(output, tuple) else output), path)
                handle.remove()

            handle = module.register_forward_hook(hook)

        for name, module in model.named_modules():
            if isinstance(module, BaseLayerWithLoRA):
                save_once(Path(folder) / f"{name}.pt", module)

    def quantizing_kernels(self) -> list[str]:
        """Return the names of our quantizing kernels that have run."""
        kernels = block_quant._quantize_norm, block_quant._quantize_silu
        return [kernel.fn.__name__ for kernel in kernels if any(found[0] for found in kernel.device_caches.values())]

    def has_read_ahead(self) -> bool:
        """Whether all of a version that is not committed yet was read."""
        ahead = self.weight_transfer_engine._stager._ahead
        return ahead is not None and ahead.is_whole

    def sequences_that_share(self) -> int:
        """How many read a common prompt in the last step that decoded; 0 where attention is another backend's."""
        runner = self.model_runner  # type: ignore[attr-defined]  # the worker's
        builders = [group.get_metadata_builder(0) for groups in runner.attn_groups for group in groups]
        groupings = [builder.grouping for builder in builders if hasattr(builder, "grouping")]
        return sum(int((grouping.last.shared_rows >= 0).sum()) for grouping in groupings if grouping.last is not None)


def _multiplied_with(module: torch.nn.Module) -> torch.Tensor:
    """The BF16 weight [N, K] that the layer's packed kernel has, whatever its parameter says: its product with 1."""
    columns = module.embedding_dim if isinstance(module, ParallelLMHead) else module.input_size
    identity = torch.eye(int(columns), dtype=torch.bfloat16, device=module.weight.device)
    return module.quant_method.apply(module, identity, bias=None).T


def _scale_suffix(experts: torch.nn.Module) -> str:
    [suffix] = {made.scale_suffix for made in WEIGHT_FORMATS.values()
                if hasattr(experts, f"w13_weight{made.scale_suffix}")}  # fmt: skip
    return suffix


def digest(tensor: torch.Tensor) -> str:
    """xxh3-128 of the tensor's bytes, row-major, with its dtype and shape."""
    data = tensor.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype} {list(tensor.shape)} {xxhash.xxh3_128_hexdigest(data)}"
