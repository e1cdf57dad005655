"""The labels of the versions that a replica has served, for the spans of what they sampled.

vLLM knows a version by its number alone, and a completion may have tokens of several.
"""

from collections.abc import Sequence

from rollout_service.protocol.rollout import Completion
from rollout_service.protocol.weight_log import Head

MOST_VERSIONS = 1000
"""More than a completion lives through."""


class ServedLabels:
    """Version → label."""

    def __init__(self) -> None:
        self._labels: dict[int, str] = {}

    def serve(self, head: Head) -> None:
        """A version is loaded."""
        self._labels.pop(head.version, None)  # the log may have been set back: the number may mean another one
        if head.label is not None:
            self._labels[head.version] = head.label
            for version in list(self._labels)[:-MOST_VERSIONS]:
                del self._labels[version]

    def on(self, completions: Sequence[Completion]) -> tuple[Completion, ...]:
        """The completions with the labels in their spans."""
        return tuple(self._on(completion) for completion in completions)

    def _on(self, completion: Completion) -> Completion:
        if not any(span.version in self._labels for span in completion.spans):
            return completion
        spans = (span.model_copy(update={"label": self._labels.get(span.version)}) for span in completion.spans)
        return completion.model_copy(update={"spans": tuple(spans)})
