"""Methods that replicas call on vLLM's workers, in addition to vLLM's own (``worker_extension_cls``)."""

from typing import TYPE_CHECKING

from rollout_service.compat.vllm_internals import adapter_targets
from rollout_service.engine.attention.worker import AttentionWorker
from rollout_service.engine.sleeping import SleepingWorker
from rollout_service.errors import InvalidRequest
from rollout_service.kv_scales.worker import measure_kv

if TYPE_CHECKING:
    from rollout_service.engine.loading.transfer import LoadReport, LogWeightTransferEngine
    from rollout_service.protocol.fleet import Staging


class VersionStaging(SleepingWorker, AttentionWorker):
    """Mixed into vLLM's worker class. It stages versions while the engine serves, measures KV scales, releases and
    reallocates memory, and reports the attention backends and their reads."""

    weight_transfer_engine: "LogWeightTransferEngine"

    def staging_address(self) -> str:
        """Return the address of the staging server, for ``staging_calls.stage_at``."""
        return self.weight_transfer_engine.staging_server.address

    def staging_kind(self) -> "tuple[Staging, str | None]":
        """Return the kind of staging buffer. The second value is the reason, if the kind was chosen automatically."""
        return self.weight_transfer_engine.staging, self.weight_transfer_engine.why_there

    def adapter_targets(self) -> list[str]:
        """Return the layers that compute with LoRA adapters, by the last part of their names."""
        return sorted(adapter_targets(self.weight_transfer_engine.model))

    def measure_kv(self, sequences: list[list[int]], scales: dict[str, float] | None) -> dict[str, object] | str:
        """See ``kv_scales.worker.measure_kv``. Returns a KVMeasurement as JSON, or why this model has none."""
        engine = self.weight_transfer_engine
        try:
            measured = measure_kv(engine.model, engine.vllm_config, engine.device, sequences, scales)
        except InvalidRequest as error:  # vLLM passes on no types of errors
            return error.message
        return measured.model_dump(mode="json")

    def load_report(self) -> "LoadReport":
        """Return how the last version was loaded, see ``LogWeightTransferEngine.report``."""
        return self.weight_transfer_engine.report
