"""The kernel's indexing, masks and grouping against the reference. Its speed and last bits are decided on a GPU."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.cuda import GroupedQuantization
from rollout_service.quant.formats import FP8_BLOCK, FP8_CHANNEL, INT8_CHANNEL
from tests.support.grouped import assert_bytes_of_the_reference, outputs
from tests.support.matrices import weights


@settings(max_examples=40)
@given(st.lists(weights(views=True, stacked=True), max_size=4), st.booleans())
def test_a_group_of_any_matrices_gets_the_bytes_of_the_reference(group, power_of_two):
    assert_bytes_of_the_reference(group, power_of_two=power_of_two)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])  # one for all examples
@pytest.mark.usefixtures("large_programs")
@given(st.lists(weights(views=True, stacked=True), max_size=2), st.sampled_from([FP8_CHANNEL, INT8_CHANNEL]))
def test_rows_too(group, form):
    assert_bytes_of_the_reference(group, form=form)


@pytest.mark.parametrize("form", [FP8_CHANNEL, INT8_CHANNEL], ids=lambda form: form.name)
def test_rows_in_the_programs_that_a_gpu_gets(form):
    assert_bytes_of_the_reference([torch.randn(5, 5000).bfloat16(), torch.randn(5, 15).T], form=form)


@pytest.mark.usefixtures("large_programs")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3.4e38])
@pytest.mark.parametrize(("form", "place"), [(FP8_BLOCK, [1, 0]), (FP8_CHANNEL, [130, 0]), (INT8_CHANNEL, [130, 0])])
def test_a_bad_weight_shows_in_the_scale_of_its_block_or_row_alone(form, place, bad):
    weight = torch.randn(150, 150)
    weight[130, 5] = bad
    codes, scales = outputs([weight], form)
    GroupedQuantization([weight], codes, scales, form=form).run()
    assert (~torch.isfinite(scales[0])).nonzero().tolist() == [place]


def test_equal_layouts_share_a_launch():
    experts = [torch.randn(4, 256, 128).bfloat16() for _ in range(3)]
    others = [torch.randn(128, 256).bfloat16(), torch.randn(128, 256).bfloat16(), torch.randn(128, 256)]
    launch = assert_bytes_of_the_reference([*experts, *others])
    assert launch.launches == 3


def test_tables_of_all_launches_begin_where_the_compiled_kernel_reads_them():
    several = [torch.randn(rows, 128) for rows in (128, 256, 384) for _ in range(3)]
    prepared = assert_bytes_of_the_reference(several)
    tables = [launch.arguments[0] for launch in prepared._launches]
    assert [len(table) for table in tables] == [3, 3, 3]
    assert {table.data_ptr() % 16 for table in tables} == {0}


def test_a_prepared_group_sees_the_weights_of_the_moment_it_runs():
    weight = torch.randn(128, 256).bfloat16()
    codes, scales = outputs([weight])
    prepared = GroupedQuantization([weight], codes, scales)
    weight.mul_(-3)
    prepared.run()
    assert torch.equal(codes[0].view(torch.uint8), quantize_blockwise(weight)[0].view(torch.uint8))


@pytest.mark.parametrize(
    ("weight", "codes", "scales", "message"),
    [
        (torch.zeros(5), torch.zeros(5), torch.zeros(1), "of 1 dimensions"),
        (torch.zeros(5, 5).int(), torch.zeros(5, 5), torch.zeros(1, 1), "int32"),
        (torch.zeros(5, 5), torch.zeros(5, 4), torch.zeros(1, 1), r"needs codes of its shape and scales \[1, 1\]"),
        (torch.zeros(5, 5), torch.zeros(5, 5), torch.zeros(1, 2), r"\[5, 5\] and \[1, 2\]"),
        (torch.zeros(5, 5), torch.zeros(5, 5), torch.zeros(1, 1), "codes must be float8_e4m3fn"),
        (torch.zeros(5, 5), torch.zeros(5, 5).to(torch.float8_e4m3fn).T, torch.zeros(1, 1), "contiguous"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(weight, codes, scales, message):
    with pytest.raises(ValueError, match=message):
        GroupedQuantization([weight], [codes], [scales])
