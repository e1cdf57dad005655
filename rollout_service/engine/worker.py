"""What replicas may call in vLLM's workers beside vLLM's own methods (``worker_extension_cls``)."""

from pathlib import Path
from typing import Any


class VersionStaging:
    """Mixed into vLLM's worker class: reads the next version into the staging area while the engine serves."""

    weight_transfer_engine: Any

    def stage_version(self, folder: str) -> None:
        """Begin; see ``LogWeightTransferEngine.stage``."""
        self.weight_transfer_engine.stage(Path(folder))

    def version_is_staged(self) -> bool:
        """Whether it is done; raises what went wrong."""
        return bool(self.weight_transfer_engine.is_staged())

    def load_report(self) -> dict[str, Any]:
        """How the last version was loaded; see ``LogWeightTransferEngine.report``."""
        return dict(self.weight_transfer_engine.report)

    def plan_loads(self, allowed: bool) -> None:
        """Whether versions may be loaded by a plan, or all by vLLM's layerwise reload."""
        self.weight_transfer_engine.plan_loads(allowed)
