"""Copies are seen as they are made, joined where they meet, and trusted only if they leave the same bytes."""

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout_service.engine.loading.copy_plan import (
    Copy,
    CopyRecorder,
    NoPlan,
    Sources,
    _coalesce,
    _require_same,
    _runs,
)
from rollout_service.engine.loading.placement import Placement
from rollout_service.gpu.grouped_copy import Rows


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


def stored(*shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """fp32 tensors of random numbers, "0", "1" and so on, each in memory of its own."""
    return {str(number): torch.randn(shape) for number, shape in enumerate(shapes)}


def recording(model: Fused, tensors: dict[str, torch.Tensor]) -> CopyRecorder:
    sources = Sources()
    for name, tensor in tensors.items():
        sources.add(name, tensor)
    return CopyRecorder(model, sources)


class Recorded(NamedTuple):
    """A model that was loaded, the copies that did it, and a staging area that holds what they read, packed."""

    model: Fused
    copies: list[Copy]
    placement: Placement
    area: torch.Tensor

    def of(self, parameter: str) -> list[Copy]:
        return [copy for copy in self.copies if copy.parameter == parameter]


@pytest.fixture
def recorded() -> Recorded:
    model, tensors = Fused(), stored((2, 8), (4, 8), (4, 6))
    with recording(model, tensors) as recorder:
        model.load(*tensors.values())
    placement = Placement(copy.span for copy in recorder.copies)
    area = torch.zeros(96 + placement.nbytes, dtype=torch.uint8)[96:]  # a part of other memory
    for span, place in placement.places.items():
        held = tensors[span.tensor].reshape(-1).view(torch.uint8)
        for row in range(span.rows):
            first, target = span.start + row * span.stride_bytes, place + row * span.row_bytes
            area[target : target + span.row_bytes] = held[first : first + span.row_bytes]
    return Recorded(model, recorder.copies, placement, area)


def replayed(parameter: torch.Tensor, recorded: Recorded, copies: list[Copy]) -> torch.Tensor:
    """Return what the copies put into a parameter, byte by byte."""
    held = bytearray(parameter.numel() * parameter.element_size())
    for c in copies:
        for row in range(c.rows):
            source = recorded.placement.places[c.span] + row * c.staged_stride()
            target = c.target + row * c.target_stride_bytes
            held[target : target + c.row_bytes] = recorded.area[source : source + c.row_bytes].numpy().tobytes()
    return torch.frombuffer(held, dtype=parameter.dtype).view(parameter.shape)


def spoil(parameter: torch.Tensor) -> None:
    parameter.data[0, 0] += 1


def transpose(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data.T.contiguous()


def spread(parameter: torch.nn.Parameter) -> None:
    parameter.data = torch.zeros(6, 16)[:, ::2]


def shrink(parameter: torch.nn.Parameter) -> None:
    parameter.data = parameter.data[:2].clone()


class TestRecorder:
    def test_recorded_copies_do_what_the_loader_did(self, recorded):
        for name, parameter in recorded.model.named_parameters():
            assert parameter.abs().sum() > 0
            assert torch.equal(replayed(parameter, recorded, recorded.of(name)), parameter)
            _require_same(name, parameter, recorded.of(name), recorded.placement, recorded.area)

    def test_only_the_part_read_of_each_row_is_staged(self, recorded):
        assert [(copy.source, copy.row_bytes, copy.rows) for copy in recorded.of("cut")] == [(12, 12, 4)]
        assert recorded.placement.nbytes == sum(4 * p.numel() for p in recorded.model.parameters())

    def test_other_sources_and_conversions_are_not_recorded(self):
        model, tensors = Fused(), stored((4, 3))
        with recording(model, tensors) as recorder:
            model.cut.data.copy_(torch.ones(4, 3))
            model.cut.data.copy_(tensors["0"].view(torch.int32))
        assert recorder.copies == []

    def test_memory_that_is_used_again_holds_what_was_put_there_last(self):
        sources, memory = Sources(), torch.zeros(100, dtype=torch.uint8)
        start = memory.data_ptr()
        sources.add("a", memory[:40])
        sources.add("b", memory[40:60])
        assert sources.find(start + 45) == ("b", 5) and sources.find(start + 60) is None
        sources.add("c", memory[:50])
        assert sources.find(start + 45) == ("c", 45) and sources.find(start + 50) is None
        sources.add("d", memory[50:80])
        assert sources.find(start) == ("c", 0) and sources.find(start + 79) == ("d", 29)
        assert sources.find(start - 1) is None

    def test_a_copy_of_one_row_into_many_reads_it_once(self):
        model, tensors = Fused(), stored((1, 3))
        with recording(model, tensors) as recorder:
            model.cut.data.copy_(tensors["0"].expand(4, 3))
        [copy] = recorder.copies
        assert (copy.rows, copy.span.nbytes, copy.staged_stride()) == (4, 12, 0)


class TestPlan:
    @pytest.mark.parametrize(
        ("change", "says"),
        [(spoil, "stored"), (transpose, "stored"), (spread, "has gaps"), (shrink, "fewer than were loaded")],
    )
    def test_a_kernel_that_changes_what_was_loaded_is_noticed(self, recorded, change, says):
        change(recorded.model.fused)
        with pytest.raises(NoPlan, match=f"fused.*{says}"):
            _require_same("fused", recorded.model.fused, recorded.of("fused"), recorded.placement, recorded.area)

    def test_a_kernel_may_read_what_was_loaded_in_another_order(self, recorded):
        """CUTLASS is given [K, N], a view of the [N, K] that was loaded."""
        recorded.model.fused.data = recorded.model.fused.data.T
        _require_same("fused", recorded.model.fused, recorded.of("fused"), recorded.placement, recorded.area)

    def test_a_part_that_was_not_loaded_is_noticed(self, recorded):
        held = recorded.model.fused, recorded.placement, recorded.area
        with pytest.raises(NoPlan, match="stored bytes"):
            _require_same("fused", held[0], recorded.of("fused")[:1], *held[1:])
        with pytest.raises(NoPlan, match="not at all"):
            _require_same("fused", held[0], [], *held[1:])


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


class TestRuns:
    def test_runs_that_follow_each_other_on_both_sides_become_one_and_rows_never(self):
        first, second, elsewhere = Rows(0, 100, 10), Rows(10, 110, 6), Rows(16, 200, 4)
        assert _coalesce([second, elsewhere, first]) == [Rows(0, 100, 16), elsewhere]
        rows = [Rows(0, 100, 4, rows=2, source_stride_bytes=8, target_stride_bytes=4), Rows(16, 108, 4)]
        assert _coalesce(rows) == rows

    @given(pairs_of_views())
    def test_runs_cover_every_element_once_and_in_its_place(self, views):
        target, source = views
        wanted = sorted((s + i, t + i) for s, t in zip(places(source), places(target), strict=True) for i in (0, 1))
        made = sorted(
            (run.source + row * run.source_stride_bytes + i, run.target + row * run.target_stride_bytes + i)
            for run in _runs(target, source)
            for row in range(run.rows)
            for i in range(run.row_bytes)
        )
        assert made == wanted
