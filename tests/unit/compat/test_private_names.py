"""Names that a library does not document stand in ``compat/``, and are as they were read.

What counts as private, of vLLM, Ray and transformers:
- an import of a module that is not in DOCUMENTED;
- a name that begins with one underscore: imported, read or set on an object that is not the code's own, or spelled out
  in a string for ``getattr`` and its like, where it is not one of this package's own names;
- an attribute of vLLM's objects that only UNDOCUMENTED names;
- ``setattr`` and ``delattr`` on anything but a class of the same file.
Python's own protocols (``__name__``) and the documented methods of its named tuples do not count.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from rollout_service.compat import UnsupportedRelease, require_release
from tests.unit.compat.private_names import names_in, problem

PACKAGE = Path(__file__).parents[3] / "rollout_service"
INTERNALS = {
    "compat/vllm_internals.py",
    "compat/vllm_attention.py",
    "compat/vllm_deep_gemm.py",
    "compat/vllm_scheduler.py",
    "compat/vllm_serving.py",
    "compat/ray_internals.py",
    "compat/transformers_internals.py",
    "client/verl/plugin.py",
}

DOCUMENTED = {
    # "API Reference", Summary: https://docs.vllm.ai/en/stable/api/
    "vllm",
    "vllm.config",
    "vllm.inputs",
    # what vllm.RequestOutput and vllm.SamplingParams, of the same page, are made of
    "vllm.exceptions",
    "vllm.logprobs",
    "vllm.outputs",
    "vllm.sampling_params",
    # "LoRA Adapters": https://docs.vllm.ai/en/stable/features/lora/
    "vllm.lora.request",
    # "Plugin System": https://docs.vllm.ai/en/stable/design/plugin_system/
    "vllm.platforms",
    "vllm.v1.metrics.loggers",
    # "Weight Transfer": https://docs.vllm.ai/en/stable/training/weight_transfer/base/, and the examples of its RL pages
    "vllm.distributed.weight_transfer.base",
    "vllm.distributed.weight_transfer.factory",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.exceptions",
    # the registries of attention backends and quantization methods, whose docstrings show how to add one
    "vllm.v1.attention.backends.registry",
    "vllm.model_executor.layers.quantization",
    "vllm.model_executor.layers.quantization.base_config",
    # "Custom Logits Processors": https://docs.vllm.ai/en/v0.32.0/features/custom_logitsprocs/
    "vllm.v1.sample.logits_processor",
    "vllm.v1.worker.gpu.sample.logits_processor",
    # Ray's reference: https://docs.ray.io/en/latest/serve/api/
    "ray",
    "ray.exceptions",
    "ray.serve",
    "ray.serve.config",
    "ray.serve.deployment",
    "ray.serve.exceptions",
    "ray.serve.handle",
    "ray.serve.metrics",
    "ray.serve.request_router",
    "ray.serve.schema",
    # "Main classes": https://huggingface.co/docs/transformers/main_classes/model
    "transformers",
}
UNDOCUMENTED = {"engine_core", "pause_scheduler_async", "load_numel", "moe_kernel", "inter_token_latencies_iter"}
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}
PRIVATE = re.compile(r"_(?!_)")
OF_NAMED_TUPLES = {"_asdict", "_replace"}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def private_uses(source: str, package: frozenset[str] = frozenset()) -> Iterator[str]:
    """What of the source counts as private, see above. ``package``: names that are our own when ``self`` has them."""
    tree = parsed(source)
    own = set(own_names(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if not documented(alias.name))
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from private_imports(node.module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Attribute):
            mine = OF_NAMED_TUPLES | (own | package if ast.unparse(node.value) == "self" else own)
            if node.attr in UNDOCUMENTED or (PRIVATE.match(node.attr) and node.attr not in mine):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and private_by_name(node, own):
            yield ast.unparse(node)


def private_imports(module: str, names: list[str]) -> Iterator[str]:
    ours = module.startswith("rollout_service")
    for name in names:
        known = documented(module) or documented(f"{module}.{name}")
        if not known or (PRIVATE.match(name) and not ours):
            yield f"{module}.{name}"


def private_by_name(call: ast.Call, own: set[str]) -> bool:
    """Return True for ``setattr`` on others' objects, and for ``getattr`` of a name with an underscore."""
    if not isinstance(call.func, ast.Name) or call.func.id not in BY_NAME:
        return False
    start = call.args[1].values[0] if isinstance(call.args[1], ast.JoinedStr) else call.args[1]
    private = isinstance(start, ast.Constant) and PRIVATE.match(str(start.value)) and start.value not in own
    sets = call.func.id in ("setattr", "delattr") and ast.unparse(call.args[0]) not in own
    return sets or bool(private)


def own_names(tree: ast.Module) -> Iterator[str]:
    """What a file defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and on_itself(node):
            yield node.attr


def on_itself(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def documented(module: str) -> bool:
    """Whether names may be taken from a module anywhere: all but those of the three libraries, and some of theirs."""
    return module.partition(".")[0] not in ("vllm", "ray", "transformers") or module in DOCUMENTED


def test_private_names_stand_in_one_file_for_each_library():
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    ours = frozenset(name for source in sources.values() for name in own_names(parsed(source)))
    found = {
        f"{file}: {use}"
        for file, source in sources.items()
        if file not in INTERNALS
        for use in private_uses(source, ours)
    }
    assert found == set()


PRIVATE_SOURCES = (
    "from vllm.v1.core.sched import scheduler",
    "import vllm.v1.worker.gpu_worker",
    "from vllm import _custom_ops",
    "from ray.serve._private.api import serve_start",
    "from transformers.modeling_utils import PreTrainedModel",
    "stats.inter_token_latencies_iter = []",
    "llm.engine_core.add_request_async()",
    "kernel._get_layer_params(layer)",
    "class A:\n    def f(self):\n        self._made_by_the_base_class()",
    "getattr(layer, f'_{x}_scale')",
    "hasattr(model, '_keep_in_fp32_modules_strict')",
    "setattr(kernel, name, tensor)",
)
OTHER_SOURCES = (
    "from vllm import SamplingParams",
    "from ray import serve",
    "class A:\n    def f(self):\n        self._mine = 1\n        return self._mine, type(self).__name__",
    "getattr(config, 'num_key_value_heads', None)",
    "from rollout_service.client._http import Http",
    "key._asdict()",
)


def test_private_names_are_told_from_public_and_own_ones():
    assert [source for source in PRIVATE_SOURCES if not list(private_uses(source))] == []
    assert [source for source in OTHER_SOURCES if list(private_uses(source))] == []


def test_private_names_are_as_they_were_read():
    names = names_in(Path(__file__).with_name("names.txt").read_text())
    assert len(names) > 150
    problems = [f"{name.module}.{name.name} {why}" for name in names if (why := problem(name)) is not None]
    assert not problems, "\n".join(["names have changed:", *problems])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("[vllm.envs]\nno_such", "is not there"),
        ("[vllm.no_such]\na", "is not there"),
        ("[vllm.envs]\nenable_envs_cache(seconds)", r"takes \(\) now, not \(seconds\)"),
        ("[vllm.config]\nCompilationConfig: no_such", "gives its objects no no_such"),
        ("[vllm.v1.worker.gpu_worker file]\nNobody: a", "does not define Nobody"),
    ],
)
def test_a_name_that_has_changed_is_found(line, found):
    [name] = names_in(line)
    assert re.search(found, problem(name) or "")


def test_another_release_is_refused_unless_it_is_asked_for(monkeypatch):
    require_release(("no-such-distribution", "ray"), "2.60")
    with pytest.raises(UnsupportedRelease, match=r"^ray 2\.60\.\S+ is installed, but .* for ray 2\.59: install"):
        require_release(("ray",), "2.59")
    monkeypatch.setenv("ROLLOUT_SERVICE_ANY_RELEASE", "1")
    require_release(("ray",), "2.59")
