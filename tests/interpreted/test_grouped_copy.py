"""The copying kernel, run by Triton's interpreter: every byte arrives, whatever its alignment, and no other moves."""

import pytest
import torch

from rollout_service.gpu.grouped_copy import TILE_BYTES, GroupedCopy, Rows


@pytest.mark.parametrize("shift", [0, 4, 3])
@pytest.mark.parametrize("nbytes", [16, 100, TILE_BYTES + 48, 1])
def test_bytes_arrive_and_their_neighbours_stay(shift, nbytes):
    source = torch.randint(0, 256, (TILE_BYTES + 256,), dtype=torch.uint8)
    target = torch.zeros_like(source)
    GroupedCopy([Rows(source.data_ptr() + shift, target.data_ptr() + 16, nbytes)], torch.device("cpu")).run()
    assert torch.equal(target[16 : 16 + nbytes], source[shift : shift + nbytes])
    assert not target[:16].any() and not target[16 + nbytes :].any()


def test_rows_are_taken_out_of_a_wider_matrix():
    source = torch.randint(0, 256, (6, 64), dtype=torch.uint8)
    target = torch.zeros(6, 32, dtype=torch.uint8)
    rows = Rows(source.data_ptr() + 16, target.data_ptr(), 32, 6, source_stride_bytes=64, target_stride_bytes=32)
    GroupedCopy([rows], torch.device("cpu")).run()
    assert torch.equal(target, source[:, 16:48])
