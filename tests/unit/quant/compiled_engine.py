"""What a compiled engine of vLLM 0.32 on a GPU computes, kernel by kernel, written again in plain torch."""

from typing import Any, Literal

import torch
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from rollout_service.quant.blockwise import dequantize_blockwise, quantize_blockwise

Step = Literal["norm", "floors", "qk_norm", "swiglu", "residual", "unfused"]
"""A step in which compiled kernels differ from those of ``enforce_eager``."""


class CompiledEngine:
    """The forward pass of a transformers model in BF16 as a compiled engine makes it, with products in fp32.

    Without a mixture, or with ``layer.mlp`` of the model itself in its place. PEFT's adapters are computed beside the
    layers; with them no kernel quantizes for the next one.
    """

    def __init__(self, model: Any, *, fp8: bool, without: Step | None = None, adapters: bool = False) -> None:
        """``without``: compute this step as ``enforce_eager`` would. ``adapters``: the engine has other adapters."""
        self._model, self._fp8, self._without = model, fp8, without
        has_adapters = adapters or any(hasattr(module, "lora_A") for module in model.modules())
        self._fuses = fp8 and (without == "unfused" or not has_adapters)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return BF16 [batch, tokens, vocabulary]."""
        backbone = self._model.model
        added, residual = backbone.embed_tokens(tokens).float(), torch.zeros(())
        cos, sin = backbone.rotary_emb(added, torch.arange(tokens.shape[1])[None])
        layers = list(backbone.layers)
        for layer in layers:
            has_mixture = hasattr(layer.mlp, "gate")
            inputs, residual = self._norm(added, residual, layer.input_layernorm, fused=self._fuses)
            added = self._attend(layer.self_attn, inputs, cos.bfloat16().float(), sin.bfloat16().float())
            residual = residual.bfloat16().float()  # attention ends a compiled piece
            fused = self._fuses and not has_mixture
            inputs, residual = self._norm(added, residual, layer.post_attention_layernorm, fused=fused)
            if self._fuses and has_mixture and layer is not layers[-1]:
                residual = residual.bfloat16().float()  # the fused kernel of the next norm reads it
            added = layer.mlp(inputs.bfloat16()).float() if has_mixture else self._mlp(layer.mlp, inputs)
        hidden, _ = self._norm(added, residual, backbone.norm, fused=False)
        return linear(hidden.bfloat16(), self._model.lm_head.weight)

    def _norm(
        self, added: torch.Tensor, residual: torch.Tensor, norm: Any, *, fused: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``rms_norm_per_block_quant`` if ``fused``, else Inductor's kernel; returns the result and the residual."""
        summed = added + residual
        deviation = torch.rsqrt(summed.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        if not fused:
            normed = ((summed * deviation) * norm.weight.float()).bfloat16().float()
            return normed, summed.bfloat16().float() if self._without == "residual" else summed
        if self._without == "norm":
            normed = ((summed * deviation) * norm.weight.float()).bfloat16()
        else:
            normed = (summed * deviation).bfloat16() * norm.weight
        return normed.float(), summed.bfloat16().float()

    def _attend(self, attention: Any, inputs: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        heads = []
        for name in ("q", "k", "v"):
            layer = getattr(attention, f"{name}_proj")
            head = self._linear(layer, inputs, fused=self._fuses, keeps_sum=name == "k")
            head = head.unflatten(-1, (-1, attention.head_dim))
            norm = getattr(attention, f"{name}_norm", None)
            if norm is not None:
                deviation = torch.rsqrt(head.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
                head = (head * deviation) * norm.weight.float()
                if self._without == "qk_norm":
                    head = head.bfloat16().float()
            head = head.transpose(1, 2)
            if name != "v":
                left, right = head.chunk(2, -1)
                first, second = cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
                head = torch.cat([left * first - right * second, right * first + left * second], -1)
            heads.append(head.bfloat16().float())
        query, key, value = heads
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        return self._linear(attention.o_proj, attended.bfloat16().float(), fused=False)

    def _mlp(self, mlp: Any, inputs: torch.Tensor) -> torch.Tensor:
        gate, up = (self._linear(each, inputs, fused=self._fuses) for each in (mlp.gate_proj, mlp.up_proj))
        if not self._fuses:
            return self._linear(mlp.down_proj, (silu(gate) * up).bfloat16().float(), fused=False)
        made = (gate * torch.sigmoid(gate)) * up  # silu_and_mul_per_block_quant
        if self._without == "swiglu":
            made = made.bfloat16().float()
        return self._linear(mlp.down_proj, made, fused=True)

    def _quantized(self, inputs: torch.Tensor, *, fused: bool) -> torch.Tensor:
        """Codes times scales, of ``per_token_group_quant`` unless ``fused``."""
        groups = inputs.unflatten(-1, (-1, 128))
        largest = groups.abs().amax(-1, keepdim=True)
        quotient = torch.tensor(448.0)
        if fused and self._without != "floors":
            scales = torch.maximum(largest / quotient, torch.tensor(1 / (448 * 512)))
        else:
            scales = torch.maximum(largest, torch.tensor(1e-10)) / quotient
        return ((groups / scales).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scales).flatten(-2)

    def _linear(self, layer: Any, inputs: torch.Tensor, *, fused: bool, keeps_sum: bool = False) -> torch.Tensor:
        """The product of the input after its quantization, rounded to BF16, and the sums with it, rounded each.

        ``keeps_sum``: the kernel that rotates the result adds the bias, if it is fused, and rounds no sum.
        """
        if self._fp8:
            weight = dequantize_blockwise(*quantize_blockwise(layer.weight.detach()))
            made = linear(self._quantized(inputs, fused=fused), weight).bfloat16()
            if layer.bias is not None and fused and keeps_sum:
                return made.float() + layer.bias.float()
            if layer.bias is not None:
                made = made + layer.bias
        else:
            made = linear(inputs.bfloat16(), layer.weight, layer.bias)
        for name, matrix in getattr(layer, "lora_A", {}).items():
            buffer = linear(inputs, matrix.weight.bfloat16().float()).bfloat16().float()
            change = linear(buffer, (layer.lora_B[name].weight.bfloat16() * layer.scaling[name]).float())
            made = made + change.bfloat16()
        return made.float()
