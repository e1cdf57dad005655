"""The model that is served, without its weights: which tensors a version must bring.

Built from the folder's config.json by transformers on the meta device, so names and shapes are those that a trainer's
``state_dict()`` has.
"""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import xxhash
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rollout_service.errors import InvalidManifest
from rollout_service.weights.upload import UploadTensor

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True)
class ServedModel:
    """Shape of the served model. ``shapes``: every tensor of a version; ``linears``: modules that can be quantized."""

    path: Path
    config: PretrainedConfig
    shapes: dict[str, tuple[int, ...]]
    linears: dict[str, tuple[int, int]]
    tied: bool
    """The output head is the embedding: a version need not bring ``lm_head.weight``."""

    @classmethod
    def load(cls, path: Path) -> "ServedModel":
        """Read ``path/config.json``. Raises FileNotFoundError, or ValueError for a model this release cannot serve."""
        if not (path / "config.json").is_file():
            raise FileNotFoundError(
                f"model.path={path} has no config.json: name a folder in Hugging Face's layout, or set "
                "model.create: tiny-qwen3 to have a small one made there"
            )
        config = AutoConfig.from_pretrained(path)
        if any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ValueError(f"{path} is a mixture of experts ({config.model_type}): dense models only in this release")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        return cls(
            path=path,
            config=config,
            shapes={name: tuple(tensor.shape) for name, tensor in model.state_dict().items()},
            linears={
                name: (module.out_features, module.in_features)
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear) and name != "lm_head"
            },
            tied=bool(config.tie_word_embeddings),
        )

    @cached_property
    def fingerprint(self) -> str:
        """xxh3-128 over architecture, tensor table and tying: versions of another model are refused."""
        shapes = sorted(self.shapes.items())
        content = {"architectures": self.config.architectures, "shapes": shapes, "tied": self.tied}
        return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())

    @property
    def vocab_size(self) -> int:
        """Token ids are ``[0, vocab_size)``."""
        return int(self.config.vocab_size)

    @property
    def has_tokenizer(self) -> bool:
        """Text prompts and stop strings work."""
        return all((self.path / file).is_file() for file in TOKENIZER_FILES)

    def check_table(self, tensors: Iterable[UploadTensor]) -> None:
        """Compare a trainer's tensor table with the model, both ways; raises InvalidManifest with every difference."""
        tensors = tuple(tensors)
        names = [tensor.name for tensor in tensors]
        optional = {LM_HEAD} if self.tied else set()
        found = {
            "duplicate": sorted(name for name, times in Counter(names).items() if times > 1),
            "unknown": sorted(set(names) - set(self.shapes)),
            "missing": sorted(set(self.shapes) - set(names) - optional),
            "wrong_shape": [
                f"{t.name} is {list(t.shape)}, the model's is {list(self.shapes[t.name])}"
                for t in tensors
                if t.name in self.shapes and t.shape != self.shapes[t.name]
            ],
        }
        wrong = {what: items for what, items in found.items() if items}
        if wrong:
            summary = "; ".join(f"{len(items)} {what}: {', '.join(items[:4])}" for what, items in wrong.items())
            raise InvalidManifest(f"the version does not fit the served model {self.path.name}: {summary}", wrong)
