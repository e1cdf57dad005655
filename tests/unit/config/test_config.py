"""The configuration refuses what it does not know, and says what to write instead."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel, ValidationError

from rollout_service.app import _resources
from rollout_service.config import AuthConfig, ServiceConfig
from rollout_service.config.service import host_and_port
from rollout_service.model.hub import pinned, with_model_here


def message_of(args: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as refused:
        ServiceConfig.model_validate(args)
    return str(refused.value)


def test_a_model_path_beyond_ascii_is_refused_wherever_it_comes_from(tmp_path, monkeypatch):
    assert ServiceConfig.model_validate({"model": {"path": "models/a b/%41/~x"}}).model.path == Path(
        "models/a b/%41/~x"
    )
    assert "name a symbolic link" in message_of({"model": {"path": "models/modèle"}})
    monkeypatch.setenv("MODELS", "/données")
    model = ServiceConfig.model_validate({"model": {"path": "$MODELS/tiny"}}).model
    with pytest.raises(ValueError, match=r"model\.path=/données/tiny has characters"):
        model.here()
    (tmp_path / "modèles").mkdir()
    monkeypatch.chdir(tmp_path / "modèles")
    with pytest.raises(ValueError, match=r"model\.path=.*/modèles/tiny has characters"):
        ServiceConfig.model_validate({"model": {"path": "tiny"}}).resolved()


class TestSections:
    @pytest.mark.parametrize("section", ServiceConfig.model_fields)
    def test_sections_are_frozen_and_refuse_unknown_fields_by_name(self, section):
        part = getattr(ServiceConfig(), section)
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, next(iter(type(part).model_fields)), None)
        message = message_of({section: {"mispelt": 1}})
        assert f"{section}.mispelt" in message and "not permitted" in message

    @pytest.mark.parametrize(
        ("args", "where"),
        [
            ({"engine": {"max_model_len": 1}}, "engine.max_model_len"),
            ({"engine": {"admission_limit": 0}}, "engine.admission_limit"),
            ({"engine": {"gpu_memory_utilization": 1.5}}, "engine.gpu_memory_utilization"),
            ({"engine": {"kv_offload_gib": 0}}, "engine.kv_offload_gib"),
            ({"engine": {"cuda_graph_sizes": [True]}}, "engine.cuda_graph_sizes.0"),
            ({"kv_cache": {"dtype": "int8"}}, "kv_cache.dtype"),
            ({"kv_cache": {"scales_policy": "calibrate"}}, "kv_cache.scales_policy"),
            ({"quant": {"weights": "int4"}}, "quant.weights"),
            ({"quant": {"scales": "fp16"}}, "quant.scales"),
            ({"quant": {"indivisible": "pad"}}, "quant.indivisible"),
            ({"scaling": {"min_replicas": -1}}, "scaling.min_replicas"),
            ({"scaling": {"target_kv_usage": 1.1}}, "scaling.target_kv_usage"),
            ({"scaling": {"num_gpus": math.inf}}, "scaling.num_gpus"),
            ({"weights": {"ingest_resources": {"a": math.nan}}}, "weights.ingest_resources.a"),
            ({"weights": {"ingest_resources": {"a": -1}}}, "weights.ingest_resources.a"),
            ({"weights": {"ingest_resources": {"GPU": 1}}}, "weights.ingest_resources.GPU: set weights.ingest_num"),
            ({"weights": {"ingest_resources": {"CPU": 1}}}, "weights.ingest_resources.CPU: leave it out"),
            ({"scaling": {"resources": {"GPU": 1}}}, "scaling.resources.GPU: set scaling.num_gpus"),
            ({"scaling": {"groups": {"Eval 1": {"version": 1}}}}, "scaling.groups.Eval 1"),
            ({"scaling": {"groups": {"eval": {}}}}, "scaling.groups.eval.version"),
            ({"scaling": {"groups": {"eval": {"version": "next"}}}}, "scaling.groups.eval.version"),
            ({"scaling": {"groups": {"eval": {"version": 1, "replicas": 0}}}}, "scaling.groups.eval.replicas"),
            ({"weights": {"part_bytes": 1}}, "weights.part_bytes"),
            ({"weights": {"keep_versions": 0}}, "weights.keep_versions"),
            ({"model": {"create": "llama"}}, "model.create"),
            ({"monitor": {"ratio_bound": 1}}, "monitor.ratio_bound"),
            ({"monitor": {"suspect_prob_error": 1}}, "monitor.suspect_prob_error"),
        ],
    )
    def test_a_value_out_of_range_is_refused_by_field(self, args, where):
        assert where in message_of(args)

    @pytest.mark.parametrize(
        ("args", "where"),
        [
            ({"scaling": {"groups": {"eval": {"version": True}}}}, "scaling.groups.eval.version"),
            ({"scaling": {"min_replicas": False}}, "scaling.min_replicas"),
            ({"weights": {"kv_max_age": True}}, "weights.kv_max_age"),
            ({"engine": {"kv_offload_gib": True}}, "engine.kv_offload_gib"),
            ({"engine": {"adapters": {"max_live": True}}}, "engine.adapters.max_live"),
        ],
    )
    def test_a_boolean_is_no_number(self, args, where):
        message = message_of(args)
        assert where in message and "a number, not a boolean" in message

    @pytest.mark.parametrize("path", ["~/x", "~other/x", "$SCRATCH/x", "/disks/$USER/x"])
    @pytest.mark.parametrize(
        ("section", "field"),
        [
            *(("weights", field) for field in ("root", "disk_root", "trainer_root", "source_roots")),
            *(("weights", field) for field in ("watch", "publish")),
            *(("weights", f"upload_ssl_{file}") for file in ("certfile", "keyfile")),
            ("auth", "token_file"),
            ("chat", "chat_template"),
        ],
    )
    def test_a_path_is_refused_where_it_would_not_be_expanded(self, section, field, path):
        args = {section: {field: [path] if field == "source_roots" else path}}
        if "$" in path and field in ("root", "disk_root"):
            assert str(getattr(getattr(ServiceConfig.model_validate(args), section), field)) == path
        else:
            message = message_of(args)
            begins = "has" if path.startswith("/") else "begins with"
            assert f"{section}.{field}" in message and f"{path!r} {begins}" in message

    @pytest.mark.parametrize(
        ("section", "field", "value"),
        [
            *(("weights", field, "s3://bucket/run") for field in ("root", "disk_root", "trainer_root")),
            ("weights", "source_roots", ["file:///run"]),
        ],
    )
    def test_a_url_names_no_folder(self, section, field, value):
        message = message_of({section: {field: value}})
        assert f"{section}.{field}" in message and "is a URL" in message

    def test_no_model_is_created_in_a_folder_named_tilde(self):
        assert "'~/tiny' begins with ~" in message_of({"model": {"path": "~/tiny", "create": "tiny-qwen3"}})

    @pytest.mark.parametrize(
        ("field", "value"),
        [("source_urls", ["/data/run"]), ("source_urls", ["S3://bucket"]), ("watch", ""), ("publish", "S3://bucket")],
    )
    def test_what_no_version_could_be_read_from_is_no_store(self, field, value):
        assert f"weights.{field}" in message_of({"weights": {field: value}})


class TestFieldsThatGoTogether:
    @pytest.mark.parametrize(
        "option",
        [{"skip": ["*.o_proj"]}, {"scales": "power_of_two"}, {"indivisible": "keep_bf16"}],
        ids=lambda option: next(iter(option)),
    )
    def test_an_option_of_quantization_makes_no_sense_without_it(self, option):
        message = message_of({"quant": {"weights": "none", **option}})
        assert f"quant.{next(iter(option))}: set, but quant.weights is none" in message
        ServiceConfig.model_validate({"quant": option, "weights": {"ingest_num_gpus": 0.1}})
        written = {"weights": "none", "skip": [], "scales": "fp32", "indivisible": "error"}  # the defaults
        assert ServiceConfig.model_validate({"quant": written}).quant.weights == "none"

    @pytest.mark.parametrize(
        ("weights", "option"),
        [("fp8_channel", {"scales": "power_of_two"}), ("int8_channel", {"indivisible": "keep_bf16"})],
    )
    def test_channels_have_no_blocks_to_say_anything_about(self, option, weights):
        message = message_of({"quant": {"weights": weights, **option}})
        assert f"quant.{next(iter(option))}: set, but quant.weights is {weights}, which has no blocks" in message
        ServiceConfig.model_validate({"quant": {"weights": weights, "skip": ["*.o_proj"]}})

    @pytest.mark.parametrize(
        ("args", "named"),
        [
            ({"scaling": {"min_replicas": 4, "max_replicas": 2}}, ["max_replicas=2", "min_replicas=4"]),
            ({"weights": {"publish": "/a/b/", "watch": "/a/b"}}, ["weights.publish and weights.watch are both /a/b"]),
            ({"weights": {"publish": "s3://a", "watch": "s3://a/"}}, ["weights.publish and weights.watch are both"]),
            ({"weights": {"poll_s": 10, "dead_after_s": 20}}, ["dead_after_s=20", "poll_s=10"]),
            (
                {"engine": {"pipeline_parallel_size": 2}},
                ["engine.pipeline_parallel_size:", "an engine is on one host", "docs/hardware.md"],
            ),
            (
                {"engine": {"distributed": "ray", "pipeline_parallel_size": 2}},
                ["engine.distributed:", "an engine is on one host", "docs/hardware.md"],
            ),
            (
                {"engine": {"max_num_batched_tokens": 255}},
                ["engine.max_num_batched_tokens=255", "engine.max_num_seqs=256"],
            ),
            (
                {"engine": {"expert_parallel": True}},
                ["engine.expert_parallel", "engine.tensor_parallel_size is 1"],
            ),
        ],
    )
    def test_values_that_exclude_each_other_are_all_named(self, args, named):
        message = message_of(args)
        assert all(name in message for name in named), message

    def test_a_replica_holds_a_multiple_of_what_it_decodes(self):
        config = ServiceConfig.model_validate({"engine": {"max_num_seqs": 64}, "scaling": {"gateways": 4}})
        assert (config.engine.sequences_per_replica, config.sequences_per_gateway) == (256, 64)
        config = ServiceConfig.model_validate({"engine": {"admission_limit": 3}, "scaling": {"gateways": 4}})
        assert (config.engine.sequences_per_replica, config.sequences_per_gateway) == (3, 1)


def gpus_of(on_gpus: bool, **sections: dict[str, Any]) -> tuple[float | None, float | None]:
    """What an engine and the ingest ask Ray for."""
    config = ServiceConfig.model_validate(sections).with_gpus(on_gpus)
    return config.scaling.num_gpus, config.weights.ingest_num_gpus


class TestGpus:
    def test_left_out_they_are_those_of_an_engine(self):
        assert gpus_of(True) == (0.9, 0.1)
        assert gpus_of(True, engine={"tensor_parallel_size": 4}) == (4, 0)
        assert gpus_of(True, quant={"weights": "none"}) == (1, 0)

    def test_on_the_cpu_there_are_none(self):
        assert gpus_of(False) == gpus_of(False, engine={"tensor_parallel_size": 2}) == (0, 0)

    def test_those_that_are_given_stay(self):
        assert gpus_of(True, weights={"ingest_num_gpus": 0.25}) == (0.75, 0.25)
        assert gpus_of(True, weights={"ingest_num_gpus": 1}) == (1, 1)
        assert gpus_of(True, scaling={"num_gpus": 0.5}) == (0.5, 0)
        assert gpus_of(True, scaling={"num_gpus": 0}) == (0, 0)
        assert gpus_of(False, scaling={"num_gpus": 0.9}, weights={"ingest_num_gpus": 0.1}) == (0.9, 0.1)

    @pytest.mark.parametrize("gpus", [0.9, 1, 1.9, 3])
    def test_several_gpus_of_an_engine_are_whole_ones(self, gpus):
        message = message_of({"engine": {"tensor_parallel_size": 2}, "scaling": {"num_gpus": gpus}})
        assert f"scaling.num_gpus={gpus:g}, and engine.tensor_parallel_size=2 takes 2 whole GPUs" in message
        assert "set it to 2, or leave it out" in message and "ingest" not in message

    def test_an_ingest_s_share_is_of_another_gpu_then(self):
        engine = {"engine": {"tensor_parallel_size": 2}, "weights": {"ingest_num_gpus": 0.1}}
        message = message_of({**engine, "scaling": {"num_gpus": 1.9}})
        assert "weights.ingest_num_gpus=0.1 is then of another GPU, and with 0 the ingest uses the CPU" in message
        ServiceConfig.model_validate({**engine, "scaling": {"num_gpus": 2}})

    def test_one_gpu_is_all_that_an_engine_of_one_uses(self):
        message = message_of({"scaling": {"num_gpus": 1.9}})
        assert "engine.tensor_parallel_size is 1" in message and "or engine.tensor_parallel_size: 2" in message
        assert "the ingest quantizes on one GPU" in message_of({"weights": {"ingest_num_gpus": 1.5}})


class TestEngineKernels:
    @pytest.mark.parametrize(
        ("engine", "kernels"),
        [
            ({}, "cuda_compiled"),
            ({"enforce_eager": True}, "cuda_eager"),
            ({"extra": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}}, "cuda_eager"),
            ({"extra": {"compilation_config": {"mode": "NONE"}}}, "cuda_eager"),
            ({"extra": {"optimization_level": 0}}, "cuda_eager"),
            ({"extra": {"compilation_config": {"cudagraph_capture_sizes": [8]}}}, "cuda_compiled"),
            ({"extra": {"compilation_config": {"mode": 1}}}, None),
            ({"extra": {"compilation_config": {"pass_config": {"fuse_act_quant": False}}}}, None),
            ({"deterministic": True}, None),
            ({"env": {"TORCHINDUCTOR_EMULATE_PRECISION_CASTS": "1"}}, None),
        ],
    )
    def test_on_a_gpu_the_settings_of_compilation_decide(self, engine, kernels):
        config = ServiceConfig.model_validate({"engine": engine})
        assert config.with_gpus(True).engine_kernels == kernels
        assert (config.with_gpus(False).engine_kernels, config.engine_kernels) == ("cpu", None)


@pytest.mark.parametrize("age", [3, "auto", None])
def test_a_bound_of_kept_keys_needs_a_kept_cache(age):
    assert f"weights.kv_max_age is {age}, but weights.kv_cache_on_update is drop" in message_of(
        {"weights": {"kv_max_age": age}}
    )
    ServiceConfig.model_validate({"weights": {"kv_max_age": age, "kv_cache_on_update": "keep"}})
    ServiceConfig.model_validate(ServiceConfig().model_dump(mode="json"))


class TestOffloading:
    KEPT: ClassVar = {"kv_cache_on_update": "keep", "kv_max_age": 0}

    def test_offloaded_blocks_need_a_kept_cache(self):
        config = {"engine": {"kv_offload_gib": 1.5}}
        assert ServiceConfig.model_validate({**config, "weights": self.KEPT}).engine.kv_offload_gib == 1.5
        assert "weights.kv_cache_on_update is drop: set it to keep, with weights.kv_max_age: 0" in message_of(config)

    @pytest.mark.parametrize("other", ["enable_sleep_mode", "return_routed_experts"])
    def test_what_offloading_was_not_tested_with_is_refused(self, other):
        engine = {"kv_offload_gib": 1, other: True}
        message = message_of({"engine": engine, "weights": self.KEPT})
        assert f"engine.kv_offload_gib=1 is not tested with engine.{other}: leave one out" in message


class TestAuth:
    @pytest.mark.parametrize("token", ["secret", "", None])
    def test_a_token_in_the_configuration_is_refused_and_not_shown(self, token):
        message = message_of({"auth": {"token": token}})
        assert "auth.token is refused: Ray logs" in message and "auth.token_file" in message
        assert "secret" not in message

    def test_trusted_networks_are_ipv4_and_ipv6_networks(self):
        config = AuthConfig(trusted_networks=["10.1.0.0/16", "fd00:1::/32", "10.2.0.7"])
        assert [str(network) for network in config.trusted_networks] == ["10.1.0.0/16", "fd00:1::/32", "10.2.0.7/32"]
        assert AuthConfig.model_validate(config.model_dump(mode="json")) == config
        assert AuthConfig().trusted_networks == ()

    @pytest.mark.parametrize("network", ["10.1.0.1/16", "trainer-0", "10.1", 167837696, None])
    def test_what_is_no_network_is_refused_by_its_value(self, network):
        message = message_of({"auth": {"trusted_networks": [network]}})
        assert (
            "auth.trusted_networks.0" in message and str(network) in message and "10.1.0.0/16 or fd00:1::/32" in message
        )

    @pytest.mark.parametrize("text", ["two words", "two\nlines", "schlüssel", "bell\x07", "\n"])
    def test_a_token_file_holds_what_a_header_can_carry(self, tmp_path, text):
        file = tmp_path / "token"
        with pytest.raises(FileNotFoundError, match="token"):
            AuthConfig(token_file=file).secret()
        file.write_text(" secret\n\n")
        assert AuthConfig(token_file=file).secret() == "secret"
        file.write_text(text)
        why = "write the token alone into it" if text.strip() else "token is empty"
        with pytest.raises(ValueError, match=why) as refused:
            AuthConfig(token_file=file).secret()
        assert not text.strip() or text not in str(refused.value)


class TestUploadListener:
    @pytest.mark.parametrize(
        ("address", "host", "port"),
        [
            ("rollouts.example", "rollouts.example", None),
            ("10.1.0.7:7443", "10.1.0.7", 7443),
            ("[fd00:1::7]:7443", "fd00:1::7", 7443),
            ("ingest-0", "ingest-0", None),
        ],
    )
    def test_an_advertised_address_is_a_host_and_perhaps_a_port(self, address, host, port):
        weights = {"upload_host": "0.0.0.0", "upload_port": 7000, "upload_advertise_address": address}
        config = ServiceConfig.model_validate({"weights": weights, "auth": {"token_file": "token"}})
        assert host_and_port(config.weights.upload_advertise_address or "") == (host, port)

    @pytest.mark.parametrize(
        "address", ["", "http://a", "a b", "a:", "a:0", "a:65536", "fd00::1", "a/b", "0.0.0.0", "localhost:7000", "a@b"]
    )
    def test_what_no_other_machine_reaches_is_no_address(self, address):
        message = message_of({"weights": {"upload_advertise_address": address}})
        assert "weights.upload_advertise_address" in message and repr(address) in message

    def test_an_advertised_address_needs_a_listener_and_a_port_there(self):
        advertised = {"upload_advertise_address": "rollouts.example", "upload_port": 7000}
        assert "set it to 0.0.0.0" in message_of({"weights": advertised})
        message = message_of({"weights": advertised | {"upload_host": "0.0.0.0", "upload_port": 0}})
        assert "weights.upload_port is 0" in message

    @pytest.mark.parametrize(("there", "missing"), [("certfile", "keyfile"), ("keyfile", "certfile")])
    def test_a_certificate_and_its_key_are_given_together(self, there, missing):
        message = message_of({"weights": {f"upload_ssl_{there}": "tls"}})
        assert f"weights.upload_ssl_{there} is set, but not weights.upload_ssl_{missing}" in message


class TestModel:
    def test_the_model_s_name_is_its_folder_s_unless_given(self):
        assert ServiceConfig.model_validate({"model": {"path": "/models/Qwen3-8B"}}).model.name == "Qwen3-8B"
        assert ServiceConfig.model_validate({"model": {"served_name": "policy"}}).model.name == "policy"

    @pytest.mark.parametrize(
        ("path", "repo_id"),
        [
            ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
            ("meta-llama/Llama-3.1_8B", "meta-llama/Llama-3.1_8B"),
            ("/Qwen/Qwen3-8B", None),
            ("../Qwen3-8B", None),
            ("~/Qwen3-8B", None),
            ("$SCRATCH/Qwen3-8B", None),
            ("Qwen3-8B", None),
            ("models/Qwen/Qwen3-8B", None),
        ],
    )
    def test_two_names_and_a_slash_are_a_repository(self, path, repo_id):
        model = ServiceConfig.model_validate({"model": {"path": path}}).model
        assert model.repo_id == repo_id
        assert model.name == (repo_id or Path(path).name)

    def test_a_folder_comes_before_a_repository(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "Qwen" / "Qwen3-8B").mkdir(parents=True)
        config = ServiceConfig.model_validate({"model": {"path": "Qwen/Qwen3-8B"}})
        assert config.model.repo_id is None and config.resolved().model.path == tmp_path / "Qwen/Qwen3-8B"
        # a revision says that it is none, wherever the configuration is read
        pinned = ServiceConfig.model_validate({"model": {"path": "Qwen/Qwen3-8B", "revision": "main"}})
        assert pinned.resolved().model.repo_id == "Qwen/Qwen3-8B"
        made = ServiceConfig.model_validate({"model": {"path": "models/tiny-qwen3", "create": "tiny-qwen3"}})
        assert made.model.repo_id is None and made.resolved().model.path == tmp_path / "models/tiny-qwen3"


def paths_in(value: object) -> list[Path]:
    """Every path anywhere in a configuration, whichever field holds it."""
    if isinstance(value, Path):
        return [value]
    if isinstance(value, BaseModel):
        return [path for _, part in value for path in paths_in(part)]
    return [path for part in value for path in paths_in(part)] if isinstance(value, tuple) else []


class TestResolved:
    def test_every_path_is_absolute_once_resolved(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "models" / "m").mkdir(parents=True)
        args = {
            "model": {"path": "models/m"},
            "weights": {
                "root": "log",
                "source_roots": ["checkpoints", "../shared"],
                "watch": "checkpoints/run",
                "publish": "s3://bucket/run",
                "upload_ssl_certfile": "tls.crt",
                "upload_ssl_keyfile": "tls.key",
            },
            "auth": {"token_file": "token"},
        }
        resolved = ServiceConfig.model_validate(args).resolved()
        assert resolved.model.path == tmp_path / "models/m"
        assert resolved.weights.root == tmp_path / "log"
        assert resolved.weights.source_roots == (tmp_path / "checkpoints", tmp_path.parent / "shared")
        assert resolved.weights.watch == str(tmp_path / "checkpoints/run")
        assert resolved.weights.publish == "s3://bucket/run"
        assert resolved.weights.upload_certificate == (tmp_path / "tls.crt", tmp_path / "tls.key")
        assert resolved.auth.token_file == tmp_path / "token"
        assert all(path.is_absolute() for path in paths_in(resolved))

    def test_resolving_changes_paths_only_and_twice_changes_nothing(self, tmp_path, monkeypatch):
        config = ServiceConfig.model_validate({"engine": {"seed": 3}, "scaling": {"max_replicas": 2}})
        monkeypatch.chdir(tmp_path)
        resolved = config.resolved()
        assert (resolved.engine, resolved.scaling, resolved.quant) == (config.engine, config.scaling, config.quant)
        monkeypatch.chdir("/")
        assert resolved.resolved() == resolved == ServiceConfig.model_validate_json(resolved.model_dump_json())

    def test_variables_in_the_log_root_expand_on_the_reading_node(self, monkeypatch):
        config = ServiceConfig.model_validate({"weights": {"root": "$NODE_DISK/weights"}}).resolved()
        monkeypatch.setenv("NODE_DISK", "/mnt/first")
        assert config.weights.root_here() == Path("/mnt/first/weights")
        monkeypatch.setenv("NODE_DISK", "/mnt/second")
        assert config.weights.root_here() == Path("/mnt/second/weights")
        monkeypatch.delenv("NODE_DISK")
        with pytest.raises(ValueError, match=r"weights\.root is \$NODE_DISK/weights, and on .* set the variable"):
            config.weights.root_here()


def config_of_model(**model: object) -> ServiceConfig:
    return ServiceConfig.model_validate({"model": model})


def test_each_node_finds_the_model_in_its_own_folder(tmp_path, monkeypatch):
    config = pinned(config_of_model(path="$MODELS_OF_TEST/qwen").resolved())
    assert config.model.path == Path("$MODELS_OF_TEST/qwen") and config.model.name == "qwen"
    for node in ("a", "b"):
        monkeypatch.setenv("MODELS_OF_TEST", str(tmp_path / node))
        here = with_model_here(config).model
        assert here.path == tmp_path / node / "qwen" and here.name == "qwen"


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("MODELS_OF_TEST", raising=False)
    with pytest.raises(ValueError, match=r"model\.path is \$MODELS_OF_TEST/qwen, and on .*: set the variable"):
        with_model_here(config_of_model(path="$MODELS_OF_TEST/qwen"))


def test_a_name_that_each_node_makes_anew_is_refused(monkeypatch, tmp_path):
    with pytest.raises(ValidationError, match=r"set model\.served_name"):
        config_of_model(path="$MODEL_OF_TEST")
    monkeypatch.setenv("MODEL_OF_TEST", str(tmp_path))
    assert with_model_here(config_of_model(path="$MODEL_OF_TEST", served_name="qwen")).model.name == "qwen"


def test_a_replica_asks_ray_for_more_than_gpus():
    config = ServiceConfig.model_validate({"scaling": {"num_gpus": 1, "resources": {"rollout_node": 1}}})
    assert _resources(config)["resources"] == {"rollout_node": 1.0}


@pytest.mark.parametrize(
    ("resources", "why"),
    [({"GPU": 1}, "set scaling.num_gpus"), ({"CPU": 1}, "set scaling.num_cpus"), ({"node": 0}, "greater than 0")],
)
def test_a_resource_with_a_setting_of_its_own_is_refused(resources, why):
    with pytest.raises(ValidationError, match=why):
        ServiceConfig.model_validate({"scaling": {"resources": resources}})
