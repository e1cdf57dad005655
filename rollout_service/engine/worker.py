"""What replicas may call in vLLM's workers beside vLLM's own methods (``worker_extension_cls``)."""

from typing import TYPE_CHECKING

from rollout_service.engine.attention.worker import AttentionWorker
from rollout_service.engine.sleeping import SleepingWorker
from rollout_service.kv_scales.worker import KVScalesWorker

if TYPE_CHECKING:
    from rollout_service.engine.loading.transfer import LoadReport, LogWeightTransferEngine
    from rollout_service.protocol.fleet import Staging


class VersionStaging(KVScalesWorker, SleepingWorker, AttentionWorker):
    """Mixed into vLLM's worker class: reads and checks the next version while the engine serves; measures KV scales;
    gives memory back and takes it again; says what attends, and how much it reads."""

    weight_transfer_engine: "LogWeightTransferEngine"

    def staging_address(self) -> str:
        """Where versions are staged on request: ``staging_calls.staged_by``."""
        return self.weight_transfer_engine.staging_server.address

    def staging_kind(self) -> "tuple[Staging, str | None]":
        """Where versions are staged, and why, if that was not configured."""
        return self.weight_transfer_engine.staging, self.weight_transfer_engine.why_there

    def load_report(self) -> "LoadReport":
        """How the last version was loaded; see ``LogWeightTransferEngine.report``."""
        return self.weight_transfer_engine.report

    def plan_loads(self, allowed: bool) -> None:
        """Whether versions may be loaded by a plan, or all by vLLM's layerwise reload."""
        self.weight_transfer_engine.plan_loads(allowed)
