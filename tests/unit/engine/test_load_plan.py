"""Copies are seen as they are made, joined where they meet, and trusted only if they leave the same bytes."""

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engine.grouped_copy import Rows
from rollout_service.engine.load_plan import Copy, CopyRecorder, NoPlan, _joined, _require_same, _runs


class Fused(torch.nn.Module):
    """Two parts below one another, a half of the columns of a third, as vLLM's loaders put them."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = torch.nn.Parameter(torch.zeros(6, 8), requires_grad=False)
        self.cut = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)

    def load(self, first: torch.Tensor, second: torch.Tensor, third: torch.Tensor) -> None:
        self.fused.data.narrow(0, 0, 2).copy_(first)
        self.fused.data.narrow(0, 2, 4).copy_(second)
        self.cut.data.copy_(third.narrow(1, 3, 3))


def staged(*shapes: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A staging area of random bytes, and fp32 tensors in it, one after the other."""
    total = sum(4 * torch.Size(shape).numel() for shape in shapes)
    area = torch.randn(total // 4).view(torch.uint8)
    views, position = [], 0
    for shape in shapes:
        nbytes = 4 * torch.Size(shape).numel()
        views.append(area[position : position + nbytes].view(torch.float32).view(shape))
        position += nbytes
    return area, views


@pytest.fixture
def recorded() -> tuple[Fused, torch.Tensor, list[Copy]]:
    model = Fused()
    area, tensors = staged((2, 8), (4, 8), (4, 6))
    with CopyRecorder(model, area) as recorder:
        model.load(*tensors)
    return model, area, recorder.copies


def replayed(parameter: torch.Tensor, area: torch.Tensor, copies: list[Copy]) -> torch.Tensor:
    """What the copies put into a parameter, byte by byte."""
    held = bytearray(parameter.numel() * parameter.element_size())
    for c in copies:
        for row in range(c.rows):
            source, target = c.source + row * c.source_stride_bytes, c.target + row * c.target_stride_bytes
            held[target : target + c.row_bytes] = area[source : source + c.row_bytes].numpy().tobytes()
    return torch.frombuffer(held, dtype=parameter.dtype).view(parameter.shape)


def test_recorded_copies_do_what_the_loader_did(recorded: tuple[Fused, torch.Tensor, list[Copy]]) -> None:
    model, area, copies = recorded
    for name, parameter in model.named_parameters():
        mine = [copy for copy in copies if copy.parameter == name]
        assert parameter.abs().sum() > 0
        assert torch.equal(replayed(parameter, area, mine), parameter)
        _require_same(name, parameter, mine, area)


def test_what_does_not_come_from_the_staging_area_is_not_recorded() -> None:
    model = Fused()
    area, _ = staged((2, 8))
    with CopyRecorder(model, area) as recorder:
        model.cut.data.copy_(torch.ones(4, 3))
    assert recorder.copies == []


def test_a_conversion_on_the_way_is_not_recorded() -> None:
    model = Fused()
    area, [tensor] = staged((4, 3))
    with CopyRecorder(model, area) as recorder:
        model.cut.data.copy_(tensor.view(torch.int32))
    assert recorder.copies == []


def spoil(parameter: torch.Tensor) -> None:
    parameter.data[0, 0] += 1


def transpose(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.T


def shrink(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data[:2].clone()


@pytest.mark.parametrize(
    ("change", "says"), [(spoil, "stored bytes"), (transpose, "contiguous"), (shrink, "fewer than were loaded")]
)
def test_a_kernel_that_changes_what_was_loaded_is_noticed(
    recorded: tuple[Fused, torch.Tensor, list[Copy]], change: Callable[[torch.Tensor], None], says: str
) -> None:
    model, area, copies = recorded
    change(model.fused)
    with pytest.raises(NoPlan, match=f"fused.*{says}"):
        _require_same("fused", model.fused, [c for c in copies if c.parameter == "fused"], area)


def test_a_part_that_was_not_loaded_is_noticed(recorded: tuple[Fused, torch.Tensor, list[Copy]]) -> None:
    model, area, copies = recorded
    with pytest.raises(NoPlan, match="stored bytes"):
        _require_same("fused", model.fused, [c for c in copies if c.parameter == "fused"][:1], area)
    with pytest.raises(NoPlan, match="not at all"):
        _require_same("fused", model.fused, [], area)


def test_runs_that_follow_each_other_on_both_sides_become_one() -> None:
    first, second, elsewhere = Rows(0, 100, 10), Rows(10, 110, 6), Rows(16, 200, 4)
    assert _joined([second, elsewhere, first]) == [Rows(0, 100, 16), elsewhere]


def test_rows_are_never_joined() -> None:
    rows = [Rows(0, 100, 4, rows=2, source_stride_bytes=8, target_stride_bytes=4), Rows(16, 108, 4)]
    assert _joined(rows) == rows


@st.composite
def pairs_of_views(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """Two views of one shape, cut out of larger tensors, perhaps with their dimensions in another order."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    views = []
    for _ in range(2):
        order = draw(st.permutations(range(len(shape))))
        margins = [draw(st.integers(0, 2)) for _ in shape]
        base = torch.zeros([shape[d] + margins[d] for d in order], dtype=torch.int16)
        for place, d in enumerate(order):
            base = base.narrow(place, margins[d], shape[d])
        views.append(base.permute([order.index(d) for d in range(len(shape))]))
    return views[0], views[1]


def places(tensor: torch.Tensor) -> Iterator[int]:
    """Of each element, in the order of the shape: its first byte, counted from the view's."""
    for index in torch.cartesian_prod(*(torch.arange(n) for n in tensor.shape)).view(tensor.numel(), -1).tolist():
        yield 2 * sum(i * s for i, s in zip(index, tensor.stride(), strict=True))


@given(pairs_of_views())
def test_runs_cover_every_element_once_and_in_its_place(views: tuple[torch.Tensor, torch.Tensor]) -> None:
    target, source = views
    wanted = sorted((s + i, t + i) for s, t in zip(places(source), places(target), strict=True) for i in (0, 1))
    made = sorted(
        (run.source + row * run.source_stride_bytes + i, run.target + row * run.target_stride_bytes + i)
        for run in _runs(target, source)
        for row in range(run.rows)
        for i in range(run.row_bytes)
    )
    assert made == wanted
