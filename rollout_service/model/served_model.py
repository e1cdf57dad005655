"""The served model without its weights: the tensors that a version must have.

transformers builds it from the folder's config.json on the meta device. Names are those that ``save_pretrained``
writes.
"""

import json
import logging
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Set
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rollout_service.compat.transformers_internals import ignored_when_loading, kept_in_float32
from rollout_service.config import ModelConfig, QuantConfig
from rollout_service.errors import InvalidManifest
from rollout_service.model.engine_layout import FAMILIES, EngineLayout, Heads, read_layout, table_layout
from rollout_service.model.hub import VOCABULARIES
from rollout_service.model.naming import naming_of
from rollout_service.model.quant_plan import QuantPlan, plan
from rollout_service.protocol.experts import ExpertNaming, Piece, pieces
from rollout_service.protocol.ignored import IgnoredTensors
from rollout_service.protocol.upload import UploadTensor
from rollout_service.protocol.weight_transfer import WIRE_DTYPE_BYTES
from rollout_service.quant.formats import CODE_DTYPES

logger = logging.getLogger(__name__)

ROUTERS = ("gate", "shared_expert_gate")
"""Modules that choose experts, or scale the shared one; the last part of their names."""
_AT_COMMIT = "@"
ROTARY_BUFFERS = (
    r"rotary_pos_emb\.inv_freq",
    r"rotary_emb\.inv_freq",
    r"rotary_emb\.cos_cached",
    r"rotary_emb\.sin_cached",
)
"""Tables of rotary embeddings in old checkpoints; vLLM's ``AutoWeightsLoader`` and transformers ignore them."""
NEXT_TOKEN_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "n_predict")
"""Fields of config.json with the number of next-token layers (MTP), which vLLM reads only to draft tokens."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class ServedModel:
    """Shapes of the served model's tensors, under the names of a checkpoint on disk: each expert's matrices
    separately."""

    path: Path
    """The folder, on this node."""
    name: str
    """The name used in messages."""
    commit: str | None
    """Commit of the hub's repository that the folder is a copy of; None: it is not a copy."""
    config: PretrainedConfig
    shapes: dict[str, tuple[int, ...]]
    """Every tensor of the model. A layer's tensors are adjacent, and so are an expert's."""
    linears: dict[str, tuple[int, int]]
    """Modules that can be quantized → shape [N, K] of their weights."""
    in_memory: dict[str, tuple[int, ...]]
    """Tensors whose form in transformers' memory differs from disk, above all stacked experts; trainers may send these,
    too."""
    experts: ExpertNaming | None
    """Names of the matrices of routed experts; None: a dense model."""
    ignored_by_class: IgnoredTensors
    """Names that transformers and vLLM leave out when they load a checkpoint."""
    keep_float32: frozenset[str]
    """Tensors of ``shapes`` that need more precision than BF16: they are stored and loaded in fp32."""
    attention: tuple[str, ...]
    """Modules whose k and v have scales in an FP8 cache; empty for latent attention and for multimodal models."""
    embedding: str
    """Name of the token embedding's tensor."""
    head: str
    """Name of the output head's tensor."""
    tied: bool
    """True if the output head is the embedding: a version need not have ``head``."""

    @classmethod
    def of(cls, model: ModelConfig) -> "ServedModel":
        """Return the configured model, in a folder of this node: see ``hub.with_model_here``. Raises the errors of
        ``load``."""
        return cls.load(model.path, model.name, model.revision)

    @classmethod
    def load(cls, path: Path, name: str | None = None, commit: str | None = None) -> "ServedModel":
        """Read ``path/config.json``. ``name``: None means the folder's.

        Raises FileNotFoundError, or ValueError for a model this release cannot serve.
        """
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model.path={path} has no config.json: name a folder in Hugging Face's layout or a repository on its "
                "hub, such as Qwen/Qwen3-8B, or set model.create: tiny-qwen3 to have a small one made there"
            )
        model = _without_weights(path)
        config, experts = model.config, _expert_naming(model, path)
        embedding, head = _embedding_and_head(model, path)
        held = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        stored = {name: pieces(name, shape, experts) for name, shape in held.items()}
        shapes = {piece.name: piece.shape for piece in _experts_together(stored.values())}
        return cls(
            path=path,
            name=name or path.name,
            commit=commit,
            config=config,
            shapes=shapes,
            linears=_linears(model, stored),
            in_memory={name: shape for name, shape in held.items() if stored[name] != (Piece(name, shape),)},
            experts=experts,
            ignored_by_class=_ignored_tensors(model, {*shapes, *held}),
            keep_float32=_float32_tensors(model, shapes),
            attention=_attention_layers(model),
            embedding=_stored_weight(model, embedding, stored),
            head=_stored_weight(model, head, stored),
            tied=head.weight is embedding.weight,  # not every multimodal configuration says so
        )

    def plan(self, quant: QuantConfig, tensor_parallel_size: int = 1, expert_parallel: bool = False) -> QuantPlan:
        """Return the plan of quantized weights.

        Raises the ValueErrors of ``quant_plan.plan`` and ``layout``, and ValueError for fewer experts than GPUs with
        ``expert_parallel``.
        """
        if expert_parallel and not self.num_experts:
            raise ValueError(
                f"engine.expert_parallel is true, and {self.name} is a dense model, with no experts to share out: set "
                "it to false"
            )
        if expert_parallel and self.num_experts < tensor_parallel_size:
            raise ValueError(
                f"engine.expert_parallel shares out the {self.num_experts} experts of {self.name}, and "
                f"engine.tensor_parallel_size={tensor_parallel_size} leaves GPUs without any: set it to "
                f"{self.num_experts} at most"
            )
        if quant.weights == "none":
            return QuantPlan(frozenset())
        linears = self.layout.linears(self.shapes)
        return plan(
            linears, quant, tensor_parallel_size, self.heads, expert_parallel=expert_parallel, layout=self.layout
        )

    @cached_property
    def layout(self) -> EngineLayout:
        """vLLM's layout of its modules. For other families than ``FAMILIES``, vLLM is asked, which takes seconds unless
        the answer is cached. Raises the ValueErrors of ``read_layout``."""
        if self.config.model_type in FAMILIES:
            return table_layout(self.linears, self.heads)
        return read_layout(self.path)

    @cached_property
    def stored(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of a version: ``shapes``, without a tied head that the engine does not load."""
        if not self.tied:
            return self.shapes
        return {name: shape for name, shape in self.shapes.items() if name not in self.layout.not_loaded}

    @cached_property
    def largest_tensor_bytes(self) -> int:
        """Size in bytes of the largest tensor, in the largest dtype that may be received."""
        return max(map(math.prod, (*self.shapes.values(), *self.in_memory.values()))) * max(WIRE_DTYPE_BYTES.values())

    @property
    def elements(self) -> int:
        """Return the number of all parameters."""
        return sum(map(math.prod, self.shapes.values()))

    def stored_bytes(self, name: str, plan: QuantPlan) -> int:
        """Return the size of one tensor of a version in bytes, including block scales."""
        elements = math.prod(self.shapes[name])
        if name in plan.quantized:
            return elements + 4 * math.prod(plan.form.scale_shape(self.shapes[name]))
        return (4 if name in self.keep_float32 else 2) * elements

    @cached_property
    def ignored(self) -> IgnoredTensors:
        """Names that checkpoints and trainers may send, and no version has."""
        if self.head in self.stored:
            return self.ignored_by_class
        patterns = (*self.ignored_by_class.patterns, f"^{re.escape(self.head)}$")
        return self.ignored_by_class.model_copy(update={"patterns": patterns})

    @cached_property
    def routers(self) -> frozenset[str]:
        """Modules that choose experts, or scale the shared one. They are never quantized, and in no plan."""
        modules = (name.removesuffix(".weight") for name in self.shapes if name.endswith(".weight"))
        return frozenset(module for module in modules if module.rpartition(".")[2] in ROUTERS)

    @property
    def text_config(self) -> PretrainedConfig:
        """Return the configuration of the language model, which is the whole model for most models."""
        return _text_config(self.config)

    @property
    def is_multimodal(self) -> bool:
        """Return True if the model has other parts than the language model, such as a vision tower."""
        return self.text_config is not self.config

    @property
    def num_experts(self) -> int:
        """Return the number of routed experts of a layer; 0: a dense model."""
        return next((int(count) for key in EXPERT_COUNTS if (count := getattr(self.text_config, key, None))), 0)

    @property
    def heads(self) -> Heads | None:
        """Return the numbers of attention heads, which tensor parallelism divides; None: a model without attention."""
        query = getattr(self.text_config, "num_attention_heads", None)
        if query is None:
            return None
        return Heads(query=int(query), kv=int(getattr(self.text_config, "num_key_value_heads", None) or query))

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 over architecture, tensor table and tying, and ``@`` and the commit if there is one.

        Versions of a model with another fingerprint are refused.
        """
        shapes = sorted(self.shapes.items())
        content = {"architectures": self.config.architectures, "shapes": shapes, "tied": self.tied}
        table = xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())
        return table if self.commit is None else f"{table}{_AT_COMMIT}{self.commit}"

    def other_revision(self, fingerprint: str) -> str | None:
        """Describe a model with the same tensors but another commit, and what to set to serve it.

        None if the fingerprint is this model's, or one of other tensors.
        """
        table, _, commit = fingerprint.partition(_AT_COMMIT)
        if table != self.fingerprint.partition(_AT_COMMIT)[0] or commit == (self.commit or ""):
            return None
        if not commit:
            return f"a folder and not with {self.name} at commit {self.commit}: set model.path to that folder"
        if self.commit is None:
            return f"commit {commit} of a hub's repository: set model.path to that one, and model.revision: {commit}"
        return f"commit {commit}, and {self.name} is at {self.commit} now: set model.revision: {commit}"

    @property
    def vocab_size(self) -> int:
        """Return the size of the vocabulary: token ids are ``[0, vocab_size)``."""
        return int(self.text_config.vocab_size)

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The tokenizer of the folder, or None if it has none that can be loaded. Raises the errors of
        ``load_tokenizer``."""
        return load_tokenizer(self.path)

    @property
    def has_tokenizer(self) -> bool:
        """Return True if text prompts and stop strings are available."""
        return self.tokenizer is not None

    def check_table(self, tensors: Iterable[UploadTensor], plan: QuantPlan, *, whole: bool = True) -> None:
        """Compare a trainer's tensor table with the model; raises InvalidManifest with every difference.

        Experts may be separate or stacked. A weight of ``plan.quantized`` may be unquantized, or codes of ``plan.form``
        with their scales. Tensors in ``ignored`` may have any dtype and shape, within ``IgnoredTensors.may_have``.

        ``whole``: False if ``tensors`` are only some of the tensors; then only names and shapes are checked.
        """
        tensors = tuple(tensors)
        wrong = _differences(tensors, self, plan)
        wrong["unknown"] = [name for name in wrong["unknown"] if name not in self.ignored]
        wrong["missing"] = [name for name in wrong["missing"] if not (self.tied and name == self.head)]
        if not whole:  # codes and their scales may be in different tables
            wrong["missing"] = wrong["wrong_dtype"] = []
        wrong["too_large"] = [
            f"{tensor.name} has {tensor.nbytes} bytes"
            for tensor in tensors
            if not self.ignored.may_have(tensor.name, tensor.nbytes, self.largest_tensor_bytes)
        ]
        wrong = {what: items for what, items in wrong.items() if items}
        if wrong:
            summary = "; ".join(f"{len(items)} {what}: {', '.join(items[:4])}" for what, items in wrong.items())
            raise InvalidManifest(
                f"the version does not fit the served model {self.name}: {summary}; send the model's own tensors by "
                "Hugging Face's names, without the prefixes of wrappers (torch.compile, DDP, PEFT)",
                wrong,
            )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer in ``folder``. None: it has none, or (with a warning) none that transformers can load.

    Raises ValueError for a tokenizer.json that cannot be loaded.
    """
    files = sorted({path.name for pattern in VOCABULARIES for path in folder.glob(pattern) if path.is_file()})
    if not files:
        logger.info(
            "%s holds no tokenizer (%s): text prompts and stop strings are refused", folder, ", ".join(VOCABULARIES)
        )
        return None
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        return tokenizer
    except Exception as error:  # whatever a tokenizer's own code and the packages below it raise
        why = (
            f"{folder}: transformers cannot load the tokenizer of {', '.join(files)}: "
            f"{textwrap.shorten(str(error), 300, placeholder=' …')}"
        )
        if "tokenizer.json" in files:  # which transformers can always load unless it is damaged
            raise ValueError(f"{why}; copy or download these files again") from error
        logger.warning("%s; text prompts and stop strings are refused: convert it to tokenizer.json", why)
        return None


def _differences(tensors: tuple[UploadTensor, ...], model: ServedModel, plan: QuantPlan) -> dict[str, list[str]]:
    """Return all errors in ``tensors``, by kind of error; every list is empty if there are none."""
    known = [(tensor, shape) for tensor in tensors if (shape := _expected_shape(tensor.name, model, plan)) is not None]
    brought = Counter(name for tensor, _ in known for name in _on_disk(tensor.name, model))
    codes = {tensor.name for tensor, _ in known if tensor.dtype == plan.form.codes}
    scales = {name + plan.form.scale_suffix for name in codes & plan.quantized}
    return {
        "duplicate": sorted(name for name, times in brought.items() if times > 1),
        "unknown": sorted({tensor.name for tensor in tensors} - {tensor.name for tensor, _ in known}),
        "missing": sorted((model.stored.keys() | scales) - brought.keys()),
        "wrong_shape": [
            f"{tensor.name} is {list(tensor.shape)}, the model's is {list(shape)}"
            for tensor, shape in known
            if shape != tensor.shape
        ],
        "wrong_dtype": [line for tensor, _ in known for line in _wrong_dtype(tensor, codes, model, plan)],
    }


def _expected_shape(name: str, model: ServedModel, plan: QuantPlan) -> tuple[int, ...] | None:
    if name in model.stored:
        return model.stored[name]
    if (weight := _weight_of(name, plan)) is not None:
        return plan.form.scale_shape(model.stored[weight])
    return model.in_memory.get(name)


def _weight_of(scales: str, plan: QuantPlan) -> str | None:
    weight = scales.removesuffix(plan.form.scale_suffix)
    return weight if weight != scales and weight in plan.quantized else None


def _on_disk(name: str, model: ServedModel) -> list[str]:
    if name in model.in_memory:
        return [piece.name for piece in pieces(name, model.in_memory[name], model.experts)]
    return [name]


def _wrong_dtype(tensor: UploadTensor, codes: Set[str], model: ServedModel, plan: QuantPlan) -> Iterable[str]:
    weight, sent, form = _weight_of(tensor.name, plan), tensor.dtype, plan.form
    if weight is not None and sent != "float32":
        yield f"{tensor.name} is {sent}, {'block' if form.in_blocks else 'channel'} scales are float32"
    if weight is not None and weight not in codes:
        yield f"{tensor.name} is of no use: {weight} has not come as {form.codes}"
    if sent in CODE_DTYPES and tensor.name in model.in_memory:
        yield f"{tensor.name} is {sent}: send codes and scales under the names on disk, each expert's by themselves"
    elif sent in CODE_DTYPES and weight is None and tensor.name not in plan.quantized:
        yield f"{tensor.name} is {sent}, but it is not quantized in this service: send it in bfloat16"
    elif sent in CODE_DTYPES and weight is None and sent != form.codes:
        yield f"{tensor.name} is {sent}, and codes are {form.codes} in this service"


def _without_weights(path: Path) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        kind = AutoModelForCausalLM if _text_config(config) is config else AutoModelForImageTextToText
        with torch.device("meta"):
            return kind.from_config(config)
    except Exception as error:  # the code of a model may raise anything for a configuration that does not fit it
        raise ValueError(
            f"{path / 'config.json'} describes no causal language model that transformers can build: "
            f"{textwrap.shorten(str(error), 240, placeholder=' …')}"
        ) from error


def _text_config(config: PretrainedConfig) -> PretrainedConfig:
    return config.get_text_config(decoder=True)


def _expert_naming(model: PreTrainedModel, path: Path) -> ExpertNaming | None:
    if model.config.model_type in FAMILIES:
        return FAMILIES[model.config.model_type]
    try:
        return naming_of(model)
    except ValueError as error:
        raise ValueError(f"{path} is a {model.config.model_type}, which this release cannot serve: {error}") from error


def _experts_together(stored: Iterable[tuple[Piece, ...]]) -> Iterable[Piece]:
    """Return the pieces in the order of the model, but each expert's gate, up and down next to each other."""
    groups: dict[str, list[Piece]] = {}
    for piece in (piece for group in stored for piece in group):
        parent = piece.name.rsplit(".", 2)[0]
        groups.setdefault(parent if parent.rpartition(".")[0].endswith(".experts") else piece.name, []).append(piece)
    return (piece for group in groups.values() for piece in group)


def _linears(model: torch.nn.Module, stored: dict[str, tuple[Piece, ...]]) -> dict[str, tuple[int, int]]:
    weights = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in ("lm_head", *ROUTERS)
    }
    return {
        piece.name.removesuffix(".weight"): (piece.shape[0], piece.shape[1])
        for name, group in stored.items()
        for piece in group
        if name in weights or piece.index
    }


def _embedding_and_head(model: PreTrainedModel, path: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    try:
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:
        embedding = head = None
    if embedding is None or head is None:
        raise ValueError(
            f"{path} is a {model.config.model_type}, which this release cannot serve: transformers names no token "
            "embedding or no output head of it"
        )
    return embedding, head


def _stored_weight(model: PreTrainedModel, layer: torch.nn.Module, stored: dict[str, tuple[Piece, ...]]) -> str:
    path = next(path for path, module in model.named_modules() if module is layer)
    [piece] = stored[f"{path}.weight"]
    return piece.name


def _attention_layers(model: PreTrainedModel) -> tuple[str, ...]:
    if getattr(model.config, "kv_lora_rank", None) or _text_config(model.config) is not model.config:
        return ()  # vLLM's layer names of a multimodal model differ from the checkpoint's
    return tuple(n for n, module in model.named_modules() if hasattr(module, "k_proj") and hasattr(module, "v_proj"))


def _ignored_tensors(model: PreTrainedModel, names: set[str]) -> IgnoredTensors:
    """Return the tensors that transformers and vLLM leave out. ``names``: the model's tensors, which are never left
    out."""
    # a class lists the next-token layers of all its sizes, such as GLM-4.5's layer 46, which is a regular layer of its
    # larger model
    own = {pattern for pattern in ignored_when_loading(model) if not _is_of_a_layer_in(names, pattern)}
    patterns = {*ROTARY_BUFFERS, *own}
    config = _text_config(model.config)
    if more := next((int(count) for field in NEXT_TOKEN_LAYERS if (count := getattr(config, field, None))), 0):
        first = config.num_hidden_layers
        patterns |= {rf"(^|\.)layers\.{layer}\." for layer in range(first, first + more)}
        patterns |= {r"(^|\.)mtp\.", r"(^|\.)mtp_layers\."}
    matched = IgnoredTensors(patterns=tuple(sorted(patterns)))
    return matched.model_copy(update={"kept": tuple(sorted(name for name in names if name in matched))})


def _is_of_a_layer_in(names: set[str], pattern: str) -> bool:
    return re.search(r"layers\\?\.\d", pattern) is not None and any(re.search(pattern, name) for name in names)


def _float32_tensors(model: PreTrainedModel, shapes: Iterable[str]) -> frozenset[str]:
    """Return tensors such as DeepSeek's ``e_score_correction_bias``, which transformers and vLLM keep in fp32."""
    kept = kept_in_float32(model)
    return frozenset(name for name in shapes if not kept.isdisjoint(name.split(".")))
