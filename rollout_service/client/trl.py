"""TRL's asynchronous trainer against this service: its weights go over our upload client instead of NCCL.

    trainer = AsyncGRPOTrainer(
        model="Qwen/Qwen3-8B",
        args=AsyncGRPOConfig(vllm_server_base_url=url, ...),
        weight_transfer=RolloutServiceWeightTransfer(url, token=token),
        ...
    )

TRL's own rollout worker samples from the same address. Importing this needs neither trl nor torch; see
docs/trainers/trl.md.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from rollout_service.client._sync import SyncRolloutClient
from rollout_service.client._tensors import described, drain, other_ranks_gather
from rollout_service.errors import NotReady

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from rollout_service.client._upload import Quantize, Transport
    from rollout_service.protocol.fleet import PauseMode
    from rollout_service.protocol.upload import UploadTensor
    from rollout_service.protocol.weights import WeightStatus

logger = logging.getLogger("rollout_service.client")

POLL_S = 0.5


class RolloutServiceWeightTransfer:
    """Satisfies ``WeightTransferProtocol`` of TRL 1.16.0, trl/experimental/async_grpo/async_grpo_trainer.py.

    Each sync of TRL becomes one weight version, whose number the service gives. ``send_weights`` returns once every
    live replica serves it, so that what TRL samples afterwards is of that version or a newer one. Until then the
    engines go on with the version before, and close for the moment of the change only: ``pause`` and ``resume``
    have nothing to do. A rollout that runs across the change goes on with the new weights (``mode="keep"``, as TRL
    asks of vLLM): TRL labels its group with the version that it began with, and the logprob of each token is that
    of the version which sampled it.

    TRL makes one on every rank and calls that of the main process. The client is opened when it is first needed and
    closed by ``destroy``; after that, the same object may be used again.

    Args:
        url: Address of the service, the same as ``AsyncGRPOConfig.vllm_server_base_url``.
        token: Bearer token, if the service asks for one. TRL's rollout worker sends none, and needs none.
        mode: What happens to rollouts that run while a version is loaded, see ``CommitUpload.mode``.
        quantize: ``trainer`` sends FP8 codes, or BF16 where nothing is quantized, instead of the trainer's own
            dtype: for an FP32 trainer a quarter or half of the bytes; see ``RolloutClient.push_weights``. None: as
            ``transport`` needs it, else ``service``.
        transport: How its bytes go, see ``RolloutClient.push_weights``. ``delta`` sends what has changed since the sync
            before; ``auto`` does so too if this process quantizes and the service is on another machine.
        timeout_s: How long a version may take from its commit until every live replica serves it.
        server_timeout_s: How long ``init_weight_transfer`` waits until the service can serve.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        mode: PauseMode = "keep",
        quantize: Quantize | None = None,
        transport: Transport = "auto",
        timeout_s: float = 1800.0,
        server_timeout_s: float = 240.0,
    ) -> None:
        self._url, self._token = url, token
        self._mode, self._quantize, self._transport = mode, quantize, transport
        self._timeout_s, self._server_timeout_s = timeout_s, server_timeout_s
        self._client: SyncRolloutClient | None = None
        self._table: list[UploadTensor] | None = None
        self._status: WeightStatus | None = None

    @property
    def status(self) -> WeightStatus | None:
        """The version that was sent last, as the service answered; None before the first."""
        return self._status

    def init_weight_transfer(self) -> None:
        """Wait until the service can serve.

        Raises NotReady after ``server_timeout_s``; Unauthorized, Forbidden if it does not take weights from us.
        """
        deadline = time.monotonic() + self._server_timeout_s
        while not self._opened().health():
            if time.monotonic() >= deadline:
                raise NotReady(
                    f"the service at {self._url} could not serve within {self._server_timeout_s:g} s: is it running "
                    "there? Its GET /health says why; a model that takes longer needs a larger server_timeout_s"
                )
            time.sleep(POLL_S)
        self._opened().weights()  # who may not see versions may not push one either

    def pause(self) -> None:
        """Nothing: engines serve the version before while the next one is sent."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Upload the pairs of ``iterator`` as the next version; returns once every live replica serves it.

        The first time, the tensors are copied to host memory until names and shapes of all are known; after that, one
        is held at a time. Parameters are not copied, and must not change until this returns.

        ``iterator`` is read to its end on other ranks too (FSDP: each tensor is gathered by all). If sending fails,
        this rank takes part in the gathers that are left before it raises, so that no other rank hangs in one.

        Raises as ``RolloutClient.push_weights``.
        """
        began = time.perf_counter()
        try:
            self._status = self._push(iterator)
        except Exception:
            self._table = None  # the next attempt learns it anew
            if other_ranks_gather():
                drain(iterator)
            raise
        logger.info(
            "version %d is live on %d replicas, %.1f s after the trainer began to send it",
            self._status.version, len(self._status.replicas), time.perf_counter() - began,
        )  # fmt: skip

    def resume(self) -> None:
        """Nothing: no engine was paused."""

    def destroy(self) -> None:
        """Close every connection."""
        if self._client is not None:
            self._client.close()
        self._client = self._table = None

    def _push(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> WeightStatus:
        table = self._table
        learnt: list[UploadTensor] = []
        status = self._opened().push_weights(
            "next",
            iterator if table is not None else described(iterator, learnt),
            tensor_table=table,
            quantize=self._quantize,
            transport=self._transport,
            mode=self._mode,
            timeout_s=self._timeout_s,
        )
        self._table = table or learnt
        return status

    def _opened(self) -> SyncRolloutClient:
        if self._client is None:
            self._client = SyncRolloutClient(self._url, token=self._token)
        return self._client
