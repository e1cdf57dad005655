"""Names that a library does not document stand in one file per library, and that file notices when one is gone.

What counts as private, of vLLM, Ray and transformers:
- an import of a module that is not in DOCUMENTED;
- a name that begins with one underscore: imported, read or set on an object that is not the code's own, or spelled out
  in a string for ``getattr`` and its like, where it is not one of this package's own names;
- an attribute of vLLM's objects that only UNDOCUMENTED names;
- ``setattr`` and ``delattr``, by which anything could be set.
Python's own protocols (``__name__``) and the documented methods of its named tuples do not count.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rollout_service.compat import ray_internals, transformers_internals, vllm_attention, vllm_internals
from rollout_service.compat.private_names import PrivateName, PrivateNameMissing, require_names

PACKAGE = Path(__file__).parents[3] / "rollout_service"
INTERNALS = {
    "compat/vllm_internals.py",
    "compat/vllm_attention.py",
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


def private_uses(source: str, package: frozenset[str] = frozenset()) -> Iterator[str]:
    """What of the source counts as private, see above. ``package``: names that are our own when ``self`` has them."""
    tree = ast.parse(source)
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
    """Whether it is ``setattr``, or ``getattr`` of a name with an underscore, as far as that can be read off."""
    if not isinstance(call.func, ast.Name) or call.func.id not in BY_NAME:
        return False
    start = call.args[1].values[0] if isinstance(call.args[1], ast.JoinedStr) else call.args[1]
    private = isinstance(start, ast.Constant) and PRIVATE.match(str(start.value)) and start.value not in own
    return call.func.id in ("setattr", "delattr") or bool(private)


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


def test_private_names_stand_in_one_file_for_each_library() -> None:
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    ours = frozenset(name for source in sources.values() for name in own_names(ast.parse(source)))
    found = {
        f"{file}: {use}"
        for file, source in sources.items()
        if file not in INTERNALS
        for use in private_uses(source, ours)
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "from vllm.v1.core.sched import scheduler",
        "import vllm.v1.worker.gpu_worker",
        "from ray.serve._private.api import serve_start",
        "from transformers.modeling_utils import PreTrainedModel",
        "from vllm import _custom_ops",
        "llm.engine_core.add_request_async()",
        "kernel._get_layer_params(layer)",
        "class A:\n    def f(self):\n        self._made_by_the_base_class()",
        "getattr(layer, f'_{x}_scale')",
        "hasattr(model, '_keep_in_fp32_modules_strict')",
        "setattr(kernel, name, tensor)",
        "stats.inter_token_latencies_iter = []",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert list(private_uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "from vllm import SamplingParams",
        "from ray import serve",
        "class A:\n    def f(self):\n        self._mine = 1\n        return self._mine, type(self).__name__",
        "getattr(config, 'num_key_value_heads', None)",
        "from rollout_service.client._http import Http",
        "key._asdict()",
    ],
)
def test_what_is_public_or_our_own_is_not_taken_for_private(source: str) -> None:
    assert list(private_uses(source)) == []


@pytest.mark.parametrize("internals", [vllm_internals, vllm_attention, ray_internals, transformers_internals])
def test_the_check_at_the_start_names_each_name_that_is_gone(internals: Any) -> None:
    """Against libraries of the same modules with nothing in them."""
    for name in (name for name in internals.NAMES if not name.only_source):
        with pytest.raises(PrivateNameMissing, match=re.escape(f"{name.module}.{name.name} (read in {name.read_in})")):
            require_names(("vllm",), [name], lambda module: SimpleNamespace())


def library(**names: Any) -> Any:
    return lambda module: SimpleNamespace(**names)


class Kernel:
    """As a library might have it."""

    field: int = 0

    def __init__(self) -> None:
        self.live = 1

    @property
    def computed(self) -> int:
        return 2

    def run(self, weight: object, *, fast: bool = False) -> None:
        """Nothing."""


class Faster(Kernel):
    """Has what its base has."""


@pytest.mark.parametrize("assigns", ["live", "computed", "field"])
def test_attributes_assigned_in_a_class_or_its_bases_are_found(assigns: str) -> None:
    require_names(("x",), [PrivateName("m", "K", "x 1", assigns=(assigns,))], library(K=Faster))
    with pytest.raises(PrivateNameMissing, match=r"m\.K \(read in x 1\) gives its objects no gone any more"):
        require_names(("x",), [PrivateName("m", "K", "x 1", assigns=(assigns, "gone"))], library(K=Faster))


def test_another_signature_is_named_with_both() -> None:
    name = PrivateName("m", "K.run", "x 1", ("self", "weight", "fast"))
    require_names(("x",), [name], library(K=Kernel))
    with pytest.raises(PrivateNameMissing, match=r"m\.K\.run .* takes \(self, layer\) now, not \(self, weight, fast\)"):
        require_names(("x",), [name], library(K=SimpleNamespace(run=lambda self, layer: None)))
    with pytest.raises(PrivateNameMissing, match="is no function any more, but int"):
        require_names(("x",), [name], library(K=SimpleNamespace(run=3)))


def test_all_missing_names_are_listed_with_the_installed_version() -> None:
    names = [PrivateName("m", "first", "ray 1"), PrivateName("m", "second", "ray 1")]
    with pytest.raises(PrivateNameMissing, match=r"^ray 2\S+ is not .*m\.first \(read in.*m\.second \(read in"):
        require_names(("no-such-distribution", "ray"), names, library())


def test_a_large_module_is_read_and_not_imported() -> None:
    source_only = [name for name in vllm_internals.NAMES if name.only_source]
    assert {"weight_transfer_engine", "alibi_slopes"} <= {a for name in source_only for a in name.assigns}
    gone = PrivateName("vllm.v1.worker.gpu_worker", "Worker", "vLLM 1", assigns=("no_such",), only_source=True)
    with pytest.raises(PrivateNameMissing, match="gives its objects no no_such any more"):
        require_names(("vllm",), [gone])
    for module, what in (("vllm.v1.worker.gpu_worker", "does not define Nobody"), ("vllm.no_such", "No module named")):
        with pytest.raises(PrivateNameMissing, match=what):
            require_names(("vllm",), [PrivateName(module, "Nobody", "vLLM 1", assigns=("a",), only_source=True)])
