"""What of vLLM a configuration may set, and how the rest is refused."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from vllm import AsyncEngineArgs

from rollout_service.app import build
from rollout_service.config import ServiceConfig
from rollout_service.engine import args
from rollout_service.engine.args import engine_args
from rollout_service.engine.extra import INSTEAD, check_extra, with_extra
from rollout_service.engine.plugin import PARTIAL_PENALTIES
from tests.support.models import make_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def config_of(path: Path = Path("model"), **engine: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": {"path": path}, "kv_cache": {"dtype": "bfloat16"}, "engine": engine})


class TestExtra:
    @pytest.mark.parametrize("on_cpu", [True, False])
    def test_whatever_the_service_sets_has_an_advice(self, tmp_path, monkeypatch, on_cpu):
        make_model(tmp_path, "llama")
        owned: set[str] = set()

        def noted(arguments: dict[str, object], *_: object) -> dict[str, object]:
            owned.update(arguments)
            return {"model": arguments["model"]}

        monkeypatch.setattr(args, "with_extra", noted)
        platform = SimpleNamespace(is_cpu=lambda: on_cpu, get_device_capability=lambda: None)
        monkeypatch.setattr(args, "current_platform", platform)
        engine_args(config_of(tmp_path), (), has_tokenizer=False)
        assert owned - INSTEAD.keys() == {"compilation_config", "hf_overrides", "logits_processors"}

    def test_every_name_is_one_of_vllm_s(self):
        assert INSTEAD.keys() <= {field.name for field in fields(AsyncEngineArgs)}

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("max_model_len", "set engine.max_model_len"),
            ("data_parallel_size", "scaling.max_replicas"),
            ("trust_remote_code", "code that comes with a model is not run here"),
        ],
    )
    def test_what_the_service_decides_is_refused_before_anything_starts(self, name, instead):
        with pytest.raises(ValueError, match=rf"engine\.extra\.{name} is not taken: .*{instead}"):
            build(config_of(extra={name: 1}))

    @pytest.mark.parametrize(
        ("name", "says"),
        [
            ("max_logprob", "near are max_logprobs"),
            ("zzzzzz", "none of a name near it"),
            ("_api_process_rank", "has no such field"),
        ],
    )
    def test_an_unknown_name_is_refused_with_those_near_it(self, name, says):
        with pytest.raises(ValueError, match=f"{name}: vLLM's AsyncEngineArgs has no such field") as refused:
            check_extra(config_of(extra={name: 1}))
        assert says in str(refused.value)

    @pytest.mark.parametrize("method", ["eagle3", None])
    def test_speculation_with_weights_of_its_own_is_refused(self, method):
        with pytest.raises(ValueError, match=f"speculative_config.method is {method!r}: .*no update reaches"):
            check_extra(config_of(extra={"speculative_config": {"method": method, "model": "draft"}}))

    def test_other_logits_processors_stand_beside_the_service_s(self, tmp_path):
        make_model(tmp_path, "llama")
        made = engine_args(
            config_of(tmp_path, extra={"logits_processors": ["a:B"], "optimization_level": 1}), (), has_tokenizer=False
        )
        assert made.logits_processors == [PARTIAL_PENALTIES, "a:B"] and made.optimization_level == 1
        assert engine_args(config_of(tmp_path), (), has_tokenizer=False).logits_processors == [PARTIAL_PENALTIES]
        with pytest.raises(ValueError, match="logits_processors: give a list"):
            check_extra(config_of(extra={"logits_processors": "a:B"}))

    @pytest.mark.parametrize("given", [3, {"inductor_compile_config": "size_asserts"}])
    def test_the_compiler_s_settings_are_an_object(self, given):
        with pytest.raises(ValueError, match=r"compilation_config is .*: give an object with fields"):
            check_extra(config_of(extra={"compilation_config": given}))

    def test_speculation_without_weights_is_for_gpus(self):
        config = config_of(extra={"speculative_config": NGRAM})
        owned: dict[str, object] = {"compilation_config": {}, "hf_overrides": {}, "logits_processors": []}
        assert with_extra(owned, config, on_cpu=False)["speculative_config"] == NGRAM
        with pytest.raises(ValueError, match=r"on the CPU vLLM 0\.32 returns logprobs with it that are not numbers"):
            with_extra(owned, config, on_cpu=True)


class TestOverrides:
    def test_rope_scaling_stands_beside_the_quantization(self, tmp_path):
        make_model(tmp_path, "llama")
        overrides = {"rope_parameters": YARN, "max_position_embeddings": 4096}
        config = config_of(tmp_path, max_model_len=4096, extra={"hf_overrides": overrides})
        made = engine_args(config, ("lm_head",), has_tokenizer=False)
        assert made.hf_overrides["rope_parameters"] == {"rope_theta": 10000.0, **YARN}  # the model's own stays
        assert made.hf_overrides["quantization_config"]["modules_to_not_convert"] == ["lm_head"]
        found = made.create_model_config()
        assert found.max_model_len == 4096 and found.hf_config.rope_parameters["rope_type"] == "yarn"

    @pytest.mark.parametrize(
        ("overrides", "says"),
        [
            ({"quantization_config": 1}, "quantization_config is not taken.*rope_parameters"),
            ({"rope_scaling": 1}, "rope_scaling is not taken.*rope_parameters"),
            ({"head_dtype": "float32"}, r"head_dtype is not taken: set engine\.lm_head"),
            ({"rope_parameters": "yarn"}, "rope_parameters: give an object"),
            ("yarn", "hf_overrides is 'yarn': give an object"),
        ],
    )
    def test_what_changes_tensors_or_is_no_object_is_refused(self, overrides, says):
        with pytest.raises(ValueError, match=says):
            check_extra(config_of(extra={"hf_overrides": overrides}))
