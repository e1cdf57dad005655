"""Calls that push, list and remove LoRA adapters."""

import asyncio
import json
import secrets
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from rollout_service.client._http import Http, Repeat, parse, request_body
from rollout_service.client._tensors import TensorThread, describe
from rollout_service.errors import InvalidManifest, InvalidRequest, NotFound
from rollout_service.protocol.adapters import (
    CONFIG_FILE,
    TENSORS_FILE,
    Adapters,
    AdapterStatus,
    AdapterUpload,
    BeginAdapter,
    CommitAdapter,
    read_adapter_name,
)
from rollout_service.protocol.base import NewVersion
from rollout_service.runtime.tasks import raise_first_failure
from rollout_service.store.layout import safetensors_header

if TYPE_CHECKING:
    import torch

_PARALLEL_PARTS = 4
_SAVE_AGAIN = "save the adapter with PEFT's save_pretrained, which writes safetensors by default"


class AdapterCalls:
    """The methods of RolloutClient for adapters."""

    _control: Http

    def push_adapter(
        self,
        name: str,
        adapter: "str | Path | Mapping[str, torch.Tensor] | Any",
        *,
        config: "Mapping[str, object] | Any" = None,
        version: NewVersion = "next",
        base_version: int | str | None = None,
        label: str | None = None,
        wait: Literal["none", "all"] = "all",
        timeout_s: float = 600.0,
    ) -> Coroutine[object, None, AdapterStatus]:
        """Make a LoRA adapter the newest version of ``name``, and wait until every live replica holds it.

        Engines do not pause. Running rollouts finish under the version that they began with. Pushing the same adapter
        again returns the same version.

        Args:
            name: Requests name the adapter by it: ``generate(..., adapter=name)``.
            adapter: A PEFT model, a folder that PEFT's ``save_pretrained`` wrote, or tensors by PEFT's names.
            config: PEFT's LoraConfig, or its fields. Only with tensors.
            version: A number above the adapter's newest version, such as the training step. ``next``: the following
                one.
            base_version: The weight version that the adapter was trained on, by number or label. The push is refused if
                another one is served. None: the served one.
            label: A name of the version for people.
            wait: ``none``: return after the commit.
            timeout_s: Maximum time in seconds for ``wait``.

        Raises:
            InvalidManifest: The adapter is not plain LoRA, has a larger rank than ``engine.adapters.max_rank``, or does
                not fit the served model.
            VersionConflict: The version is not newer, the base is not served, or too many adapters are live.
            CommitTimeout: The version is committed, but a replica did not hold it in time.
            LogCorrupt: The version is committed, but a replica cannot load it.
        """
        # Not a coroutine function: SyncRolloutClient runs this part in the caller's thread, as with push_weights.
        route = _route(name)
        named = {"version": version, "base_version": base_version, "label": label}
        commit = request_body(CommitAdapter, **named, wait=wait, timeout_s=timeout_s, digest="")
        thread = TensorThread()

        async def run() -> AdapterStatus:
            try:
                settings, tensors = await thread.call(_files_of, adapter, config)
                digest = await thread.call(xxhash.xxh3_128_hexdigest, tensors)
            finally:
                thread.close()
            begin = BeginAdapter(
                config=settings,
                digest=digest,
                nbytes=len(tensors),
                nonce=secrets.token_hex(16),
            )
            reply = await self._control.send(
                "POST", route, json=begin.model_dump(mode="json"), repeat=Repeat.IDEMPOTENT
            )
            upload = parse(AdapterUpload, reply)
            if not await asyncio.to_thread(_write_here, upload, begin, tensors):
                with suppress(NotFound):  # an equal push may have committed the upload; the commit tells
                    await self._send_parts(route, upload, tensors)
            return await self._commit(name, commit.model_copy(update={"digest": upload.digest}))

        return run()

    async def _send_parts(self, route: str, upload: AdapterUpload, tensors: memoryview) -> None:
        slots = asyncio.Semaphore(_PARALLEL_PARTS)

        async def send(part: int) -> None:
            async with slots:
                await self._control.send(
                    "PUT",
                    f"{route}/uploads/{upload.digest}/parts/{part}",
                    content=bytes(tensors[part * upload.part_bytes : (part + 1) * upload.part_bytes]),
                    repeat=Repeat.IDEMPOTENT,
                )

        async with raise_first_failure() as group:
            for part in upload.missing:
                group.create_task(send(part))

    async def rollback_adapter(
        self, name: str, to: int, *, wait: Literal["none", "all"] = "all", timeout_s: float = 600.0
    ) -> AdapterStatus:
        """Make an older version of an adapter its newest again, under a new number. Nothing is uploaded.

        Args:
            name: The adapter.
            to: A version that the service keeps; ``adapters()`` lists them.
            wait, timeout_s: See ``push_adapter``.

        Raises:
            NotFound: The service has no such version any more.
            LogCorrupt: The version's files are damaged.
            CommitTimeout: See ``push_adapter``.
        """
        return await self._commit(name, request_body(CommitAdapter, rollback_to=to, wait=wait, timeout_s=timeout_s))

    async def _commit(self, name: str, commit: CommitAdapter) -> AdapterStatus:
        return await self._control.commit(
            AdapterStatus,
            f"{_route(name)}/commit",
            commit.model_dump(mode="json", exclude_none=True),
            timeout_s=commit.timeout_s,
            what=f"the commit of adapter {name}",
            instead="GET /v1/adapters tells whether it is committed",
        )

    async def adapters(self) -> list[AdapterStatus]:
        """Return all adapter versions that the service keeps, oldest first."""
        return list((await self._control.read(Adapters, "/v1/adapters")).adapters)

    async def remove_adapter(self, name: str) -> None:
        """Remove all versions of an adapter. Running rollouts finish. Raises NotFound."""
        await self._control.send("DELETE", _route(name), repeat=Repeat.IF_NOT_ACCEPTED)


def _route(name: str) -> str:
    """Return the URL of an adapter. Raises InvalidRequest for a name that would make it the URL of something else."""
    if not isinstance(name, str) or read_adapter_name(name) != (name, None):
        raise InvalidRequest(
            f"{name!r} is no name of an adapter: use at most 128 letters, digits and ._-, the first a letter or digit"
        )
    return f"/v1/adapters/{name}"


def _write_here(upload: AdapterUpload, begin: BeginAdapter, tensors: memoryview) -> bool:
    """Write the tensors' file where the ingest keeps the upload. Return False if that is on another host."""
    if upload.folder is None or begin.nonce is None:  # an older service has no folder
        return False
    folder = Path(upload.folder)
    try:
        # the nonce shows that the service named a folder of its own: it cannot have this client overwrite other files
        (folder / begin.nonce).unlink()
        with (folder / TENSORS_FILE).open("r+b") as file:
            file.write(tensors)
    except OSError:
        return False
    return True


def _files_of(adapter: Any, config: Any) -> tuple[dict[str, Any], memoryview]:
    """Return PEFT's configuration and the content of the tensors' file. Raises InvalidRequest, InvalidManifest."""
    if isinstance(adapter, str | Path):
        settings, file = _plain_json(_read_config(Path(adapter) / CONFIG_FILE)), Path(adapter) / TENSORS_FILE
        content = _read(file)
        if 8 + int.from_bytes(content[:8], "little") > len(content):  # the size of the header, and the header
            raise InvalidManifest(f"{file} is no safetensors file: it has {len(content)} bytes; {_SAVE_AGAIN}")
        return settings, memoryview(content)
    if not isinstance(adapter, Mapping):
        if not hasattr(adapter, "peft_config"):
            raise InvalidRequest(f"a {type(adapter).__name__} is no adapter: give a PEFT model, a folder, or tensors")
        from peft import get_peft_model_state_dict

        config = adapter.peft_config[adapter.active_adapter]
        adapter = get_peft_model_state_dict(adapter, adapter_name=adapter.active_adapter)
    elif config is None:
        raise InvalidRequest("tensors do not tell their rank and alpha: give PEFT's configuration as config")
    if not isinstance(config, Mapping) and not hasattr(config, "to_dict"):
        raise InvalidRequest(f"config is a {type(config).__name__}: give PEFT's LoraConfig, or its fields")
    fields: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
    return _plain_json(fields), _safetensors(adapter)


def _plain_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return PEFT's configuration as JSON holds it. Raises InvalidManifest."""
    try:
        plain: dict[str, Any] = json.loads(json.dumps(settings, default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise InvalidManifest(f"the adapter's configuration is not JSON: {error}; give PEFT's LoraConfig") from error
    return plain


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise InvalidManifest(f"{path} is not JSON: {error}; {_SAVE_AGAIN}") from error
    if not isinstance(config, dict):
        raise InvalidManifest(f"{path} holds no JSON object, but a {type(config).__name__}; {_SAVE_AGAIN}")
    return config


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}; {_SAVE_AGAIN}") from error


def _safetensors(tensors: "Mapping[str, torch.Tensor]") -> memoryview:
    """Return a safetensors file of the tensors, each copied once. safetensors' ``save`` takes four times as long.

    Raises InvalidManifest.
    """
    import torch

    try:
        described = [(describe(name, tensor), tensor) for name, tensor in tensors.items()]
    except ValueError as error:
        raise InvalidManifest(str(error)) from error
    if sharded := [slot.name for slot, tensor in described if hasattr(tensor, "full_tensor")]:
        raise InvalidManifest(
            f"tensor {sharded[0]} cannot be sent: it is a DTensor, and this rank may have a shard alone; send "
            "tensor.full_tensor(), which every rank must call"
        )
    # wide dtypes first: readers view the bytes in place, which therefore must be aligned
    described.sort(key=lambda pair: (-pair[1].itemsize, pair[0].name))
    header = safetensors_header(slot for slot, _ in described)
    file = torch.empty(len(header.text) + header.data_bytes, dtype=torch.uint8)
    content: memoryview = file.numpy().data
    content[: len(header.text)] = header.text
    position = len(header.text)
    for _, tensor in described:
        file[position : position + tensor.nbytes] = tensor.detach().contiguous().view(-1).view(torch.uint8)
        position += tensor.nbytes
    return content


def _plain(value: object) -> object:
    """Return what PEFT writes for a value that JSON does not have: a set of names, an enumeration, a dtype."""
    return sorted(value) if isinstance(value, set | frozenset) else str(getattr(value, "value", value))
