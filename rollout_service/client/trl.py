"""TRL's asynchronous trainer with this service: its weights go over our upload client instead of NCCL.

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

    from rollout_service.client._push import Quantize, Transport
    from rollout_service.protocol.fleet import PauseMode
    from rollout_service.protocol.upload import UploadTensor
    from rollout_service.protocol.weights import WeightStatus

logger = logging.getLogger("rollout_service.client")

POLL_S = 0.5


class RolloutServiceWeightTransfer:
    """Implements ``WeightTransferProtocol`` of TRL 1.16.0, trl/experimental/async_grpo/async_grpo_trainer.py.

    Each sync of TRL becomes one weight version with a number from the service. ``send_weights`` returns once every live
    replica serves it, so that later samples use that version or a newer one. Until then the engines serve the previous
    version; ``pause`` and ``resume`` therefore do nothing.

    A rollout that is running during the update continues with the new weights (``mode="keep"``, as TRL asks of vLLM).
    TRL labels its group with the version at its start. Each token's logprob is that of the version which sampled the
    token.

    TRL creates one object on every rank and uses that of the main process. The client opens at first use and closes in
    ``destroy``; the object can be used again afterwards.

    Args:
        url: Address of the service, the same as ``AsyncGRPOConfig.vllm_server_base_url``.
        token: Bearer token, if the service requires one. TRL's rollout worker sends none, and needs none.
        mode: The fate of running rollouts while a version is loaded, see ``CommitUpload.mode``.
        quantize: ``trainer`` sends FP8 codes, and BF16 for unquantized weights, instead of the trainer's own dtype. For
            an FP32 trainer that is a quarter to half of the bytes; see ``RolloutClient.push_weights``. None:
            ``trainer`` if ``transport`` needs it, else ``service``.
        transport: The way to the ingest, see ``RolloutClient.push_weights``. ``delta`` sends the changes since the last
            sync. ``auto`` does so too if this process quantizes and the service is on another machine.
        timeout_s: Maximum seconds from a version's commit until every live replica serves it.
        server_timeout_s: Maximum seconds that ``init_weight_transfer`` waits until the service is ready.
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
        """The status of the last sent version, as the service answered; None before the first."""
        return self._status

    def init_weight_transfer(self) -> None:
        """Wait until the service is ready.

        Raises NotReady after ``server_timeout_s``, and Unauthorized or Forbidden if the service does not accept our
        weights.
        """
        deadline = time.monotonic() + self._server_timeout_s
        while not self._open_client().health():
            if time.monotonic() >= deadline:
                raise NotReady(
                    f"the service at {self._url} could not serve within {self._server_timeout_s:g} s: is it running "
                    "there? Its GET /health says why; a model that takes longer needs a larger server_timeout_s"
                )
            time.sleep(POLL_S)
        self._open_client().weights()  # a caller that may not list versions may not push one either

    def pause(self) -> None:
        """Do nothing: engines serve the previous version while the next one is sent."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Upload the pairs of ``iterator`` as the next version; return once every live replica serves it.

        The first call copies the tensors to host memory until all names and shapes are known. Later calls hold one
        tensor at a time. Parameters are not copied, and must not change until this returns.

        With FSDP, all ranks gather each tensor, so ``iterator`` is read to its end on the other ranks too. If sending
        fails, this rank joins the remaining gathers before it raises, so that no other rank hangs.

        Raises the errors of ``RolloutClient.push_weights``.
        """
        began = time.perf_counter()
        try:
            self._status = self._push(iterator)
        except Exception:
            self._table = None  # the next attempt builds the table again
            if other_ranks_gather():
                drain(iterator)
            raise
        logger.info(
            "version %d is live on %d replicas, %.1f s after the trainer began to send it",
            self._status.version, len(self._status.replicas), time.perf_counter() - began,
        )  # fmt: skip

    def resume(self) -> None:
        """Do nothing: no engine was paused."""

    def destroy(self) -> None:
        """Close all connections."""
        if self._client is not None:
            self._client.close()
        self._client = self._table = None

    def _push(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> WeightStatus:
        table = self._table
        learnt: list[UploadTensor] = []
        status = self._open_client().push_weights(
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

    def _open_client(self) -> SyncRolloutClient:
        if self._client is None:
            self._client = SyncRolloutClient(self._url, token=self._token)
        return self._client
