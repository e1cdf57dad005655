"""Batches of which a plan says what a GPU does with them, with tensors of every kind: experts that are stacked, codes
and scales that come made, other dtypes, places in a file that no kernel writes to."""

import json
import threading
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch

from rollout_service.errors import QuantizationError
from rollout_service.ingest.batch_plan import BatchPlan, BatchPlans, NotPlanned
from rollout_service.model.convert import Converter
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.ring import aligned
from rollout_service.protocol.upload import TrainerRecipe, UploadTensor, placed
from rollout_service.store.layout import Layout
from rollout_service.store.manifest import StoredTensor, tensor_digests
from tests.interpreted.in_memory import table_of, writer_in

E = "model.layers.0.mlp.experts"
EXPERTS = tuple(f"{E}.{number}.{leaf}_proj.weight" for number in range(2) for leaf in ("gate", "up", "down"))
RECIPE = TrainerRecipe(
    weights="fp8_block",
    quantized=("codes", "odd", "square", "wide", *EXPERTS),
    keep_float32=("bias",),
    experts=ExpertNaming(),
)
INT8 = RECIPE.model_copy(update={"weights": "int8_channel"})
POWERS = RECIPE.model_copy(update={"scales": "power_of_two"})
WEIGHTS = {
    "norm": torch.randn(7).bfloat16(),
    "odd": torch.randn(13, 33).bfloat16(),
    "square": torch.randn(256, 128),
    "scalar": torch.tensor(2.0),
    f"{E}.gate_up_proj": torch.randn(2, 256, 128).bfloat16(),
    f"{E}.down_proj": torch.randn(2, 128, 128).half(),
    "empty": torch.zeros(0, 4).bfloat16(),
    "wide": torch.randn(128, 384).bfloat16(),
    "bias": torch.randn(3).bfloat16(),
    "embed": torch.randn(90, 64),
    "last": torch.randn(5).bfloat16(),
}
SHAPES: dict[str, tuple[int, ...]] = {
    name: tuple(tensor.shape) for name, tensor in WEIGHTS.items() if ".experts." not in name
} | dict.fromkeys(EXPERTS, (128, 128))


class TrainersMemory:
    """In place of a GPU's: batches begin at ``start``."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        self.table = table_of(tensors)
        self.data = torch.zeros(start + sum(aligned(max(t.nbytes, 1)) for t in self.table), dtype=torch.uint8)
        for (_, offset), tensor in zip(placed(self.table, start), tensors.values(), strict=True):
            if tensor.nbytes:
                data = tensor.contiguous().view(-1).view(torch.uint8)
                self.data[offset : offset + tensor.nbytes] = data

    def copied(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return a copy at an address as a GPU's memory has them, as ``GpuBatch.copied`` does."""
        room = torch.empty(nbytes + 256, dtype=torch.uint8)
        copy = room[-room.data_ptr() % 256 :][:nbytes]
        assert offset + nbytes <= self.data.nbytes
        return copy.copy_(self.data[offset : offset + nbytes])


def by_plan(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    recipe: TrainerRecipe,
    start: int = 0,
    names: Iterable[str] = SHAPES,
) -> dict[str, StoredTensor]:
    """``names``: of the version's tensors, without their scales."""
    converter = Converter(recipe, device="cpu")
    layout = Layout(converter.slots({name: SHAPES[name] for name in names}))
    memory, writer = TrainersMemory(tensors, start), writer_in(folder, layout)
    turn = threading.Lock()
    try:
        plan = BatchPlans(converter, layout.places).of(memory.table)
        assert plan is not None
        plan.store(partial(memory.copied, start), writer, torch.device("cpu"), turn)
        return {tensor.name: tensor for tensor in writer.finish()}
    finally:
        assert not turn.locked()
        writer.close()


def one_by_one(tensors: Mapping[str, torch.Tensor], recipe: TrainerRecipe) -> dict[str, bytes]:
    made = Converter(recipe, device="cpu").convert(tensors.items())
    return {name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in made}


pytestmark = pytest.mark.usefixtures("large_programs", "host_digests")


@pytest.mark.parametrize("recipe", [RECIPE, POWERS, INT8], ids=["fp8", "powers of two", "int8"])
@pytest.mark.parametrize("start", [0, 192])
def test_tensors_of_every_kind_become_what_they_become_one_by_one(tmp_path, recipe, start):
    expected = one_by_one(WEIGHTS, recipe)
    stored = by_plan(tmp_path / "planned", WEIGHTS, recipe, start)
    assert stored.keys() == expected.keys()
    for name, tensor in stored.items():
        file = (tmp_path / "planned" / tensor.file).read_bytes()
        assert file[tensor.offset : tensor.offset + tensor.nbytes] == expected[name], name
        assert (tensor.digest, tensor.chunk_digests) == tensor_digests(memoryview(expected[name]))
    if not start:  # codes and scales that come made are stored as they are
        made = dict(Converter(recipe, device="cpu").convert(WEIGHTS.items()))
        again = by_plan(tmp_path / "again", made, recipe)
        assert {name: tensor.digest for name, tensor in again.items()} == {
            name: tensor.digest for name, tensor in stored.items()
        }


def changed(tensor: torch.Tensor, value: float) -> torch.Tensor:
    copy = tensor.clone()
    if value != value and copy.dtype == torch.float8_e4m3fn:
        copy.view(torch.uint8).view(-1)[-1] = 0x7F
    else:
        copy.view(-1)[-1] = value
    return copy


def beside_few(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Return the tensor, its codes or scales, and those without a whole block: all take the interpreter seconds."""
    codes = name.removesuffix("_scale").removesuffix("_scale_inv")
    kept = (codes, f"{codes}_scale", f"{codes}_scale_inv", "norm", "scalar", "empty", "bias", "last")
    return {each: tensor for each, tensor in tensors.items() if each in kept}


@pytest.mark.parametrize(
    ("name", "value", "recipe"),
    [
        ("norm", float("inf"), RECIPE),
        ("embed", float("nan"), RECIPE),
        ("square", -3.4e38, RECIPE),  # fp32 that BF16 rounds to infinity
        (f"{E}.down_proj", float("-inf"), RECIPE),
        ("odd", float("nan"), RECIPE),
        ("odd_scale_inv", 0.0, RECIPE),
        ("wide_scale_inv", 1e-39, RECIPE),
        ("wide_scale_inv", 1e36, RECIPE),
        ("wide_scale_inv", float("nan"), RECIPE),
        ("wide_scale_inv", 0.75, POWERS),
        ("odd", -128, INT8),
        ("odd_scale", float("inf"), INT8),
    ],
)
def test_a_number_that_may_not_be_is_refused_by_name(tmp_path, monkeypatch, name, value, recipe):
    """Weights, or what comes as codes and scales."""
    monkeypatch.setattr("rollout_service.model.convert.lies_on_gpu", lambda tensor: True)
    made = dict(Converter(recipe, device="cpu").convert(WEIGHTS.items()))
    sent = made if name.startswith(("odd", "wide")) else WEIGHTS
    bad = beside_few(sent, name) | {name: changed(sent[name], value)}
    named = f"{E}.1.down_proj.weight" if name == f"{E}.down_proj" else name
    with pytest.raises(QuantizationError, match=rf"{named}\["):
        by_plan(tmp_path / "planned", bad, recipe)


def test_numbers_at_the_edge_of_what_may_be_are_taken(tmp_path):
    largest = torch.finfo(torch.bfloat16).max
    edge = {"embed": torch.full((90, 64), largest), "norm": torch.full((7,), -largest).bfloat16()}
    assert by_plan(tmp_path / "planned", edge, RECIPE, names=edge).keys() == one_by_one(edge, RECIPE).keys()
    smallest = torch.finfo(torch.float32).tiny
    made = {
        "wide": torch.full((128, 384), -448.0).to(torch.float8_e4m3fn),
        "wide_scale_inv": torch.tensor([[smallest, 0.5, 2.0**120]]),
    }
    assert by_plan(tmp_path / "codes", made, POWERS, names=["wide"]).keys() == made.keys()


@pytest.mark.parametrize(
    "tensor",
    [
        UploadTensor(name="norm", dtype="float8_e4m3fn", shape=(7,)),
        UploadTensor(name="odd", dtype="int8", shape=(13, 33)),
        UploadTensor(name="odd", dtype="bfloat16", shape=(429,)),
        UploadTensor(name="odd_scale_inv", dtype="bfloat16", shape=(1, 1)),
        UploadTensor(name=f"{E}.down_proj", dtype="bfloat16", shape=(2, 128)),
    ],
    ids=str,
)
def test_what_is_wrong_or_unusual_is_left_to_who_looks_at_each_tensor(tensor):
    converter = Converter(RECIPE, device="cpu")
    layout = Layout(converter.slots(SHAPES))
    with pytest.raises(NotPlanned):
        BatchPlan([tensor], converter, layout.places)
    assert BatchPlans(converter, layout.places).of((tensor,)) is None


def test_a_plan_is_made_once_for_the_same_tensors_and_anew_for_others():
    converter = Converter(RECIPE, device="cpu")
    layout = Layout(converter.slots(SHAPES))
    plans = BatchPlans(converter, layout.places)
    table = TrainersMemory(WEIGHTS, 0).table
    plan = plans.of(table)
    assert plan is plans.of(tuple(tensor.model_copy() for tensor in table))
    as_float = tuple(tensor.model_copy(update={"dtype": "float32"}) for tensor in table)
    assert plans.of(as_float) is not plan and plans.of(table) is not plan


def test_few_plans_are_kept(monkeypatch):
    monkeypatch.setattr("rollout_service.ingest.batch_plan._MOST_TENSORS", 3)
    converter = Converter(RECIPE, device="cpu")
    plans = BatchPlans(converter, Layout(converter.slots(SHAPES)).places)
    table = TrainersMemory(WEIGHTS, 0).table
    first, second = plans.of(table[:2]), plans.of(table[2:4])
    assert plans.of(table[2:4]) is second and plans.of(table[:2]) is not first
    assert plans.of(table) is plans.of(table)  # one that is larger than all may be is kept


def test_what_is_stored_is_made_side_by_side():
    """A few copies bring a batch to the log, and no code is moved before, if files begin matrices at equal distances
    from where a kernel writes."""
    shapes = {f"layer.{number}": (128, 512) for number in range(4)} | {"norm": (64,)}
    converter = Converter(TrainerRecipe(weights="fp8_block", quantized=tuple(shapes)[:4]), device="cpu")
    layout = Layout(converter.slots(shapes))
    table = tuple(UploadTensor(name=name, dtype="bfloat16", shape=shape) for name, shape in shapes.items())
    plan = BatchPlan(table, converter, layout.places)
    assert len(plan.stretches) == 1 and not len(plan.moved) and len(plan.copied) == 1
    ((launch, matrices),) = plan.matrices
    assert launch.whole and len(matrices) == 4
    header = json.loads(layout.files[0].header[8:])
    assert plan.stretches[0].nbytes == header["norm"]["data_offsets"][1]
