"""Models of a hub on loopback: what is downloaded, which commit, and what is said when it cannot be."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rollout_service.config import ServiceConfig
from rollout_service.config.service import ModelConfig
from rollout_service.model import hub as hub_module
from rollout_service.model.served_model import ServedModel
from rollout_service.store.log import WeightLog
from tests.support.hub_server import HubServer, hub_server
from tests.unit.ingest.trainer import config_of, started

REPO = "some-org/tiny-qwen3"
WEIGHTS = "model.safetensors"
LONG_S = 60.0
Fetched = dict[str, Any]


class Node:
    """A machine with a cache of its own, whose processes are told of one hub."""

    def __init__(self, hub: HubServer, folder: Path) -> None:
        self.hub, self.cache, self.cwd = hub, folder / "hf", folder

    def start(self, model: dict[str, str], *options: str, **variables: str) -> subprocess.Popen[str]:
        command = [*self.hub.env(self.cache, **variables), sys.executable, "-m", "tests.support.fetch_model", *options]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        process = subprocess.Popen(command, cwd=self.cwd, text=True, **pipes)
        assert process.stdin is not None
        process.stdin.write(json.dumps(model))
        process.stdin.close()
        process.stdin = None
        return process

    def fetch(self, model: dict[str, str], *options: str, **variables: str) -> Fetched:
        out, err = self.start(model, *options, **variables).communicate(timeout=LONG_S)
        assert out, err
        fetched: Fetched = json.loads(out)
        return fetched | {"log": err}

    def refused(self, model: dict[str, str], *options: str, **variables: str) -> str:
        process = self.start(model, *options, **variables)
        out, err = process.communicate(timeout=LONG_S)
        assert process.returncode == 1 and not out and "ModelNotDownloaded: " in err, err
        return err.partition("ModelNotDownloaded: ")[2]

    def download(self) -> Path:
        return Path(self.fetch({"path": REPO}, "--weights")["path"])

    def away(self, how: str) -> dict[str, str]:
        nowhere = f"{self.hub.url.rpartition(':')[0]}:1"
        return {"HF_HUB_OFFLINE": "1"} if how == "HF_HUB_OFFLINE" else {"HF_ENDPOINT": nowhere}


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with hub_server() as server:
        yield server


@pytest.fixture
def node(hub: HubServer, tmp_path: Path) -> Node:
    return Node(hub, tmp_path)


@pytest.fixture(scope="module")
def sharded_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in several safetensors with an index, and what other repositories hold besides."""
    folder = tmp_path_factory.mktemp("sharded") / "tiny"
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(folder, max_shard_size="3MB")
    for other in ("consolidated.safetensors", "pytorch_model.bin", "README.md"):
        (folder / other).write_bytes(b"not for us")
    return folder


def same_files(here: Path, there: Path, names: list[str]) -> bool:
    return all((here / name).read_bytes() == (there / name).read_bytes() for name in names)


class TestFiles:
    def test_a_node_without_the_log_gets_no_weights(self, hub, node, tiny_model):
        hub.publish(REPO, tiny_model)
        fetched = node.fetch({"path": REPO})
        small = sorted(path.name for path in tiny_model.iterdir() if path.suffix != ".safetensors")
        assert fetched["served_name"] == REPO
        assert sorted(hub.downloaded()) == small
        model = ServedModel.load(Path(fetched["path"]), fetched["served_name"], fetched["revision"])
        assert model.has_tokenizer and model.shapes == ServedModel.load(tiny_model).shapes

    async def test_version_0_is_made_of_what_the_index_names_while_progress_is_logged(self, hub, node, sharded_model):
        hub.publish(REPO, sharded_model)
        shards = sorted(path.name for path in sharded_model.glob("model-*.safetensors"))
        assert len(shards) > 2
        fetched = node.fetch({"path": REPO}, "--weights", "--log-every", "0")
        folder, log = Path(fetched["path"]), fetched["log"].splitlines()
        assert sorted(path.name for path in folder.glob("*.safetensors")) == shards
        assert same_files(folder, sharded_model, shards)
        assert {"consolidated.safetensors", "pytorch_model.bin", "README.md"}.isdisjoint(hub.downloaded())
        size = f"{sum((sharded_model / name).stat().st_size for name in shards) / 1e6:.2f}MB"
        assert {f"{REPO}: downloading 3 files, {size}", f"{REPO}: {size} of {size} downloaded"} <= set(log)
        assert "%" not in "".join(log), "no bars: there is no terminal"
        config = config_of(sharded_model, node.cwd / "log")
        here = {"path": folder, "revision": fetched["revision"], "served_name": REPO}
        async with started(config.model_copy(update={"model": config.model.model_copy(update=here)})) as ingest:
            assert (await ingest.status(0)).state == "committed"
        fingerprint = WeightLog(node.cwd / "log").manifest(0).fingerprint
        assert fingerprint == f"{ServedModel.load(sharded_model).fingerprint}@{fetched['revision']}"

    def test_a_folder_of_that_name_comes_first(self, hub, node, tiny_model):
        (node.cwd / REPO).parent.mkdir()
        (node.cwd / REPO).symlink_to(tiny_model)
        assert node.fetch({"path": REPO}, "--weights")["path"] == str(node.cwd / REPO)
        assert hub.requests == []


class TestRevisions:
    def test_a_commit_stays_when_the_branch_moves(self, hub, node, tiny_model, sharded_model):
        old = hub.publish(REPO, tiny_model, "main")
        pinned = node.fetch({"path": REPO})
        new = hub.publish(REPO, sharded_model)
        assert pinned["revision"] == old != new
        kept = node.fetch({"path": REPO, "revision": old}, "--weights")
        assert same_files(Path(kept["path"]), tiny_model, [WEIGHTS])
        assert node.fetch({"path": REPO})["revision"] == new

    def test_a_revision_that_is_not_there_is_named(self, hub, node, tiny_model):
        hub.publish(REPO, tiny_model)
        said = node.refused({"path": REPO, "revision": "v2"})
        assert f"{REPO} has no revision v2: set model.revision" in said

    def test_a_revision_needs_a_repository(self, tmp_path):
        for model in ({"path": tmp_path}, {"path": "a/b/c"}, {"path": "models/tiny", "create": "tiny-qwen3"}):
            with pytest.raises(ValueError, match=r"model\.revision is main, but model\.path=.* is no repository"):
                ServiceConfig.model_validate({"model": {**model, "revision": "main"}})


class TestInterruptions:
    def test_a_broken_connection_goes_on_where_it_was(self, hub, node, tiny_model, tmp_path):
        large = tmp_path / "large"
        large.mkdir()
        (large / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
        (large / WEIGHTS).write_bytes(os.urandom(24 << 20))
        hub.publish(REPO, large)
        hub.cut_once[WEIGHTS] = 12 << 20
        assert same_files(node.download(), large, [WEIGHTS])
        first, second = (request for request in hub.requests if request.startswith("GET") and WEIGHTS in request)
        # huggingface_hub writes 10 MiB at a time
        assert first.endswith(f"{WEIGHTS} ") and second.endswith(f"{WEIGHTS} bytes={10 << 20}-")

    def test_files_that_came_whole_are_not_fetched_again(self, hub, node, sharded_model):
        hub.publish(REPO, sharded_model)
        last = sorted(path.name for path in sharded_model.glob("model-*.safetensors"))[-1]
        hub.held[last] = threading.Event()
        process = node.start({"path": REPO}, "--weights")
        try:
            assert hub.asked_for_held.wait(LONG_S)
            while not self.lacks_only(node, last, sharded_model):
                time.sleep(0.02)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        hub.held.pop(last).set()
        folder = node.download()
        assert Counter(hub.downloaded())[last] == 2
        assert {count for name, count in Counter(hub.downloaded()).items() if name != last} == {1}
        assert same_files(folder, sharded_model, [last])

    @staticmethod
    def lacks_only(node: Node, last: str, model: Path) -> bool:
        here = {path.name for path in node.cache.rglob("model-*.safetensors")}
        return here == {path.name for path in model.glob("model-*.safetensors")} - {last}


class TestOffline:
    @pytest.mark.parametrize("how", ["the hub is away", "HF_HUB_OFFLINE"])
    def test_what_is_not_there_is_said(self, node, how):
        said = node.refused({"path": REPO}, **node.away(how))
        assert f"{REPO} at main is not, or not all, in {node.cache}/hub on {os.uname().nodename}" in said
        assert ("HF_HUB_OFFLINE" in said) is (how == "HF_HUB_OFFLINE")

    def test_what_is_in_the_cache_is_served_and_no_more(self, hub, node, tiny_model):
        commit = hub.publish(REPO, tiny_model)
        node.fetch({"path": REPO})
        said = node.refused({"path": REPO}, "--weights", **node.away("HF_HUB_OFFLINE"))
        assert "is not, or not all, in" in said and f"{hub.url} cannot be reached" in said
        folder = node.download()
        before = len(hub.requests)
        for how in ("the hub is away", "HF_HUB_OFFLINE"):
            fetched = node.fetch({"path": REPO}, "--weights", "--log-every", "0", **node.away(how))
            assert (fetched["path"], fetched["revision"]) == (str(folder), commit)
            assert "download" not in fetched["log"], "nothing comes"
        assert len(hub.requests) == before


class TestRefusals:
    def test_what_is_neither_folder_nor_repository(self, node):
        said = node.refused({"path": "models/Qwen3-8B"})
        assert f"model.path=models/Qwen3-8B is no folder in {node.cwd}, and http://127.0.0.1" in said
        assert "no repository of that name" in said

    def test_what_no_repository_can_be_called(self, hub, node):
        assert "cannot be a repository" in node.refused({"path": "models/a--b"})
        assert hub.requests == []

    def test_a_gated_repository_needs_a_token(self, hub, node, tiny_model):
        hub.publish(REPO, tiny_model)
        hub.repositories[REPO].gated = True
        said = node.refused({"path": REPO})
        assert f"{REPO} is gated: ask for access at {hub.url}/{REPO}, and set HF_TOKEN" in said
        assert node.fetch({"path": REPO}, HF_TOKEN=hub.token)["revision"]

    def test_pickles_are_no_weights(self, hub, node, tiny_model, tmp_path):
        folder = tmp_path / "pickled"
        folder.mkdir()
        (folder / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
        (folder / "pytorch_model.bin").write_bytes(b"a pickle")
        hub.publish(REPO, folder)
        said = node.refused({"path": REPO})
        assert "no weights in safetensors, but pytorch_model.bin: pickles are never opened" in said
        assert "pytorch_model.bin" not in hub.downloaded()

    def test_a_repository_without_a_model(self, hub, node, tmp_path):
        folder = tmp_path / "data"
        folder.mkdir()
        (folder / "README.md").write_text("a data set")
        hub.publish(REPO, folder)
        assert "has no config.json: it is no model to serve" in node.refused({"path": REPO})

    def test_a_cache_beyond_ascii_is_refused(self, hub, node, tiny_model):
        hub.publish(REPO, tiny_model)
        node.cache = node.cwd / "modèles"
        assert "has characters beyond ASCII" in node.refused({"path": REPO})

    def test_a_disk_that_is_too_small(self, monkeypatch, tmp_path):
        monkeypatch.setattr(hub_module.constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
        free = hub_module.shutil.disk_usage(tmp_path).free
        require_free: Callable[[ModelConfig, int], None] = hub_module._require_free
        require_free(ModelConfig(path=Path(REPO)), free // 2)
        with pytest.raises(hub_module.ModelNotDownloaded, match=rf"{REPO} needs 1.0YB more in .*set HF_HOME"):
            require_free(ModelConfig(path=Path(REPO)), 10**24)

    def test_a_disk_that_gets_full(self):
        with (
            pytest.raises(hub_module.ModelNotDownloaded, match=r"the disk of .* is full: make room, or set HF_HOME"),
            hub_module._explain_errors(ModelConfig(path=Path(REPO))),
        ):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
