"""The labels of the versions that a replica has served, for the spans of its completions.

vLLM knows only version numbers, and a completion may have tokens of several versions.
"""

from collections.abc import Sequence

from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.weight_log import Head

MAX_VERSIONS = 1000
"""Maximum number of labels; more than a completion can span."""


class ServedLabels:
    """A map from version to label."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def serve(self, head: Head) -> None:
        """Record a loaded version."""
        self._labels.pop(head.version, None)  # the log may have been reset, so that the number means another version
        if head.label is not None:
            self._labels[head.version] = head.label
            for version in list(self._labels)[:-MAX_VERSIONS]:
                del self._labels[version]

    def on(self, completions: Sequence[Completion]) -> tuple[Completion, ...]:
        """Return the completions with labels in their spans."""
        return tuple(self._on(completion) for completion in completions)

    def _on(self, completion: Completion) -> Completion:
        if not any(span.version in self._labels for span in completion.spans):
            return completion
        spans = (span.model_copy(update={"label": self._labels.get(span.version)}) for span in completion.spans)
        return completion.model_copy(update={"spans": tuple(spans)})
