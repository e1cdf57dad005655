"""Of which processors vLLM's attention reads an FP8 KV cache, and what is said of the others."""

import pytest
import torch
from vllm.platforms import current_platform

from rollout_service.config import ServiceConfig
from rollout_service.engine.args import engine_args
from rollout_service.engine.cpu.fp8_cache import why_no_fp8_cache
from tests.support.models import make_model

NEITHER = {"cpu_name": "a processor", "avx2": True, "avx512_f": False, "amx_tile": False}


def on_processor(monkeypatch: pytest.MonkeyPatch, capabilities: dict[str, str | bool]) -> None:
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: True)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)


@pytest.mark.parametrize("feature", ["avx512_f", "amx_tile"])
def test_one_of_two_features_is_enough(monkeypatch, feature):
    on_processor(monkeypatch, NEITHER | {feature: True})
    assert why_no_fp8_cache() is None


@pytest.mark.parametrize("capabilities", [NEITHER, {"cpu_name": "a processor", "architecture": "aarch64"}])
def test_a_processor_with_neither_is_named(monkeypatch, capabilities):
    on_processor(monkeypatch, capabilities)
    assert why_no_fp8_cache() == (
        "vLLM reads an FP8 KV cache with AVX-512 or AMX, and this processor (a processor) has neither"
    )


def test_with_a_gpu_the_processor_does_not_matter(monkeypatch):
    on_processor(monkeypatch, NEITHER)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)
    assert why_no_fp8_cache() is None


def test_by_name_it_is_refused_with_what_to_set(tmp_path, monkeypatch):
    make_model(tmp_path, "llama")

    def cache_dtype(dtype: str) -> str:
        config = ServiceConfig.model_validate({"model": {"path": tmp_path}, "kv_cache": {"dtype": dtype}})
        return engine_args(config, (), has_tokenizer=False).kv_cache_dtype

    on_processor(monkeypatch, NEITHER | {"avx512_f": True})
    assert cache_dtype("fp8_e4m3") == "fp8_e4m3"
    on_processor(monkeypatch, NEITHER)
    assert cache_dtype("bfloat16") == "auto"  # vLLM's name of the model's own dtype
    with pytest.raises(
        ValueError,
        match=r"kv_cache\.dtype is fp8_e4m3, and .*\(a processor\) has neither: set it to auto or to bfloat16",
    ):
        cache_dtype("fp8_e4m3")
