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
from rollout_service.engine.batch_invariance import refuse_batch_invariance
from rollout_service.engine.environment import engine_environment
from rollout_service.engine.extra import INSTEAD, check_extra, with_extra
from rollout_service.engine.plugin import PARTIAL_PENALTIES
from tests.support.models import make_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
ASKED: dict[str, object] = {"deterministic": True}
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
BIND = "VLLM_CPU_OMP_THREADS_BIND"


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

    def test_other_arguments_reach_the_engine(self, tmp_path):
        make_model(tmp_path, "llama")
        made = engine_args(config_of(tmp_path, extra={"optimization_level": 1}), (), has_tokenizer=False)
        assert made.optimization_level == 1

    @pytest.mark.parametrize(
        ("name", "instead"),
        [
            ("max_model_len", "set engine.max_model_len"),
            ("max_logprobs", "set engine.max_logprobs"),
            ("tensor_parallel_size", "set engine.tensor_parallel_size"),
            ("quantization", "set quant.weights"),
            ("data_parallel_size", "scaling.max_replicas"),
            ("trust_remote_code", "code that comes with a model is not run here"),
            ("kv_transfer_config", "set engine.kv_offload_gib"),
        ],
    )
    def test_what_the_service_decides_is_refused(self, name, instead):
        with pytest.raises(ValueError, match=rf"engine\.extra\.{name} is not taken: .*{instead}"):
            check_extra(config_of(extra={name: 1}))

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

    def test_it_is_refused_before_anything_starts(self):
        with pytest.raises(ValueError, match=r"engine\.extra\.seed is not taken: set engine\.seed"):
            build(config_of(extra={"seed": 7}))

    @pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model", "medusa", None])
    def test_speculation_with_weights_of_its_own_is_refused(self, method):
        with pytest.raises(ValueError, match=f"speculative_config.method is {method!r}: .*no update reaches"):
            check_extra(config_of(extra={"speculative_config": {"method": method, "model": "draft"}}))

    def test_other_logits_processors_stand_beside_the_service_s(self, tmp_path):
        make_model(tmp_path, "llama")
        made = engine_args(config_of(tmp_path, extra={"logits_processors": ["a:B"]}), (), has_tokenizer=False)
        assert made.logits_processors == [PARTIAL_PENALTIES, "a:B"]
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
        config = config_of(tmp_path, extra={"hf_overrides": {"rope_parameters": YARN}})
        made = engine_args(config, ("lm_head",), has_tokenizer=False)
        assert made.hf_overrides["rope_parameters"] == {"rope_theta": 10000.0, **YARN}  # the model's own stays
        assert made.hf_overrides["quantization_config"]["modules_to_not_convert"] == ["lm_head"]

    def test_the_engine_s_model_has_it(self, tmp_path):
        make_model(tmp_path, "llama")
        overrides = {"rope_parameters": YARN, "max_position_embeddings": 4096}
        config = config_of(tmp_path, max_model_len=4096, extra={"hf_overrides": overrides})
        found = engine_args(config, (), has_tokenizer=False).create_model_config()
        assert found.max_model_len == 4096 and found.hf_config.rope_parameters["rope_type"] == "yarn"

    @pytest.mark.parametrize("name", ["quantization_config", "hidden_size", "rope_scaling"])
    def test_what_changes_tensors_is_refused(self, name):
        with pytest.raises(ValueError, match=f"hf_overrides.{name} is not taken.*rope_parameters"):
            check_extra(config_of(extra={"hf_overrides": {name: 1}}))

    def test_the_head_s_dtype_has_a_setting_of_its_own(self):
        with pytest.raises(ValueError, match=r"head_dtype is not taken: set engine\.lm_head"):
            check_extra(config_of(extra={"hf_overrides": {"head_dtype": "float32"}}))

    def test_what_is_no_object_is_refused(self):
        with pytest.raises(ValueError, match="give an object"):
            check_extra(config_of(extra={"hf_overrides": "yarn"}))


class TestEnvironment:
    def test_variables_reach_the_engine_s_processes(self):
        found = engine_environment(config_of(env={"NCCL_SOCKET_IFNAME": "eth0"}))
        assert found["NCCL_SOCKET_IFNAME"] == "eth0" and found["VLLM_NO_USAGE_STATS"] == "1"

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("VLLM_NO_USAGE_STATS", "the service sets it to '1'"),
            ("CUDA_VISIBLE_DEVICES", "Ray sets it"),
            ("RAY_ADDRESS", "Ray sets it"),
            ("A B", "no name of an environment variable"),
        ],
    )
    def test_a_variable_that_is_set_elsewhere_is_refused(self, name, why):
        with pytest.raises(ValueError, match=f"engine.env.{name}.*{why}"):
            engine_environment(config_of(env={name: "0"}))

    def test_cpu_engines_of_one_machine_get_no_cores_of_their_own(self):
        alone = config_of()
        several = ServiceConfig.model_validate({**alone.model_dump(), "scaling": {"max_replicas": 2}})
        assert BIND not in engine_environment(alone)
        assert engine_environment(several)[BIND] == "nobind"
        chosen = several.model_copy(update={"engine": several.engine.model_copy(update={"env": {BIND: "2-5"}})})
        assert engine_environment(chosen)[BIND] == "2-5"


class TestBatchInvariance:
    def test_it_is_refused_on_the_cpu(self, tmp_path):
        make_model(tmp_path, "llama")
        with pytest.raises(ValueError, match="no batch-invariant kernels for the CPU"):
            engine_args(config_of(tmp_path, **ASKED), (), has_tokenizer=False)

    @pytest.mark.parametrize("weights", ["fp8_block", "fp8_channel"])
    def test_it_is_refused_for_experts_in_fp8(self, weights):
        asked = config_of(**ASKED).model_dump()
        config = ServiceConfig.model_validate({**asked, "quant": {"weights": weights}})
        with pytest.raises(ValueError, match=r"experts in FP8.*quant\.weights: none"):
            refuse_batch_invariance(config, on_cpu=False, has_experts=True)

    def test_it_is_taken_where_vllm_keeps_it(self):
        """None of these raises."""
        config = config_of(**ASKED)
        refuse_batch_invariance(config, on_cpu=False, has_experts=False)
        bf16 = ServiceConfig.model_validate({**config.model_dump(), "quant": {"weights": "none"}})
        refuse_batch_invariance(bf16, on_cpu=False, has_experts=True)
        refuse_batch_invariance(config_of(), on_cpu=True, has_experts=True)

    def test_the_setting_alone_switches_it_on(self):
        assert engine_environment(config_of(**ASKED))["VLLM_BATCH_INVARIANT"] == "1"
        assert engine_environment(config_of())["VLLM_BATCH_INVARIANT"] == "0"
        with pytest.raises(ValueError, match=r"VLLM_BATCH_INVARIANT is not taken: set engine\.deterministic"):
            engine_environment(config_of(env={"VLLM_BATCH_INVARIANT": "1"}))
