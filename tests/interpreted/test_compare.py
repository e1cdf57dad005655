"""What a GPU finds to have changed, with the digests that it makes, is what threads find."""

import pytest
import torch

from rollout_service.client import _compare
from rollout_service.client._compare import GpuBytes, _compared, _encoded, changed_elements
from rollout_service.protocol import delta
from rollout_service.store import manifest
from tests.unit.client.test_compare import pair, piece_of


@pytest.mark.parametrize("share", [0.0, 0.01, 0.24, 0.4])
def test_digests_and_segments_are_those_of_threads(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (manifest, _compare):
        monkeypatch.setattr(module, "CHUNK_BYTES", 5000)
    monkeypatch.setattr(delta, "SEGMENT_BYTES", 4096)
    old, new = pair(torch.bfloat16, share)
    piece = piece_of(new, 2)
    found = _encoded(changed_elements(old, new, 2), piece, GpuBytes(new, [span.place for span in piece.spans]))
    expected = _compared(old, [new[span.place] for span in piece.spans], piece)
    assert [change.digest for change in found] == [change.digest for change in expected]
    if share < 0.4:
        assert found == expected
