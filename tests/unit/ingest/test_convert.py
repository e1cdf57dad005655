"""Trainer's tensors to stored ones: in batches, the same for everybody, and what cannot be stored is named."""

import gc
import re
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollout_service.errors import InvalidManifest, QuantizationError
from rollout_service.model import convert
from rollout_service.model.convert import Converter, Named
from rollout_service.protocol.experts import ExpertNaming
from rollout_service.protocol.upload import TrainerRecipe, UploadTensor
from rollout_service.quant.blockwise import quantize_blockwise
from rollout_service.quant.deferred_checks import DeferredChecks
from rollout_service.quant.formats import FP8_CHANNEL, INT8_CHANNEL
from rollout_service.quant.quantizer import Quantizer
from tests.unit.ingest.trainer import begin_of

EXPERTS = "model.layers.0.mlp.experts"
RECIPE = TrainerRecipe(
    weights="fp8_block",
    quantized=("q", *(f"{EXPERTS}.{e}.{leaf}_proj.weight" for e in range(3) for leaf in ("gate", "up", "down"))),
    keep_float32=("bias",),
    experts=ExpertNaming(),
)
INT8 = RECIPE.model_copy(update={"weights": "int8_channel"})
POWERS = RECIPE.model_copy(update={"scales": "power_of_two"})
FP8_BY_CHANNEL = RECIPE.model_copy(update={"weights": "fp8_channel"})
WEIGHTS = {
    "embed": torch.randn(7, 5),
    "q": torch.randn(130, 200).bfloat16(),
    f"{EXPERTS}.gate_up_proj": torch.randn(3, 256, 128).half(),
    f"{EXPERTS}.down_proj": torch.randn(3, 128, 128),
    "bias": torch.randn(3),
    "scalar": torch.tensor(2.0),
    "empty": torch.zeros(0, 4),
}


@pytest.fixture(autouse=True, params=["on the CPU", "as on a GPU", "asked at the end"])
def looked_at_together(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On a GPU one look at a batch, or at all batches, says whether all of it is sound; which tensor is not is found
    out as on the CPU."""
    monkeypatch.setattr(convert, "lies_on_gpu", lambda tensor: request.param != "on the CPU")
    at_once = Converter.convert

    def at_the_end(self: Converter, tensors: Iterable[Named], *, to_cpu: bool = True) -> Iterator[Named]:
        checks = DeferredChecks()
        yield from at_once(self, tensors, to_cpu=to_cpu, checks=checks)
        checks.require()

    if request.param == "asked at the end":
        monkeypatch.setattr(Converter, "convert", at_the_end)
    return str(request.param)


class RecordingQuantizer(Quantizer):
    """Keeps the devices of the weights of each call; quantizes those on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def quantize(self, weights: Sequence[Named], **how: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
        if weights:
            self.calls.append([str(weight.device) for _, weight in weights])
        if any(weight.device.type == "meta" for _, weight in weights):
            return [(weight, weight) for _, weight in weights]
        return super().quantize(weights, **how)


def recording(converter: Converter) -> RecordingQuantizer:
    converter._quantizer = quantizer = RecordingQuantizer()
    return quantizer


class Memory:
    """Tensors whose memory can be watched: it is a numpy array's, which lives as long as any view into it."""

    def __init__(self) -> None:
        self._arrays: list[weakref.ref[np.ndarray]] = []

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        array = values.numpy().copy()
        self._arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    @property
    def alive(self) -> int:
        gc.collect()
        return sum(array() is not None for array in self._arrays)


class TestConvert:
    @pytest.mark.parametrize("batch_bytes", [1, 40_000, 1 << 28])
    def test_names_values_and_order_do_not_depend_on_the_batches(self, batch_bytes):
        made = list(Converter(RECIPE, batch_bytes=batch_bytes).convert(WEIGHTS.items()))
        expert = f"{EXPERTS}.1.up_proj.weight"
        codes, scales = quantize_blockwise(WEIGHTS[f"{EXPERTS}.gate_up_proj"][1, 128:], expert)
        stored = dict(made)
        assert len(stored) == len(made) == 5 - 1 + 2 * 10
        assert torch.equal(stored[expert].view(torch.uint8), codes.view(torch.uint8))
        assert torch.equal(stored[f"{expert}_scale_inv"], scales)
        assert torch.equal(stored["embed"], WEIGHTS["embed"].bfloat16())
        assert torch.equal(stored["bias"], WEIGHTS["bias"]) and stored["bias"].dtype == torch.float32
        assert [name for name, _ in made][:4] == ["embed", "q", "q_scale_inv", f"{EXPERTS}.0.gate_proj.weight"]

    def test_the_table_foretells_what_is_made(self):
        converter = Converter(RECIPE)
        foretold = tuple(converter.table(begin_of(1, WEIGHTS).tensors))
        assert foretold == begin_of(1, dict(converter.convert(WEIGHTS.items()))).tensors

    def test_what_is_stored_already_passes_through_unchanged(self):
        converter = Converter(RECIPE)
        once = dict(converter.convert(WEIGHTS.items()))
        again = dict(converter.convert(once.items()))
        assert list(again) == list(once)
        assert all(
            torch.equal(again[n].view(-1).view(torch.uint8), t.view(-1).view(torch.uint8)) for n, t in once.items()
        )
        assert tuple(converter.table(begin_of(1, once).tensors)) == begin_of(1, once).tensors

    def test_few_calls_quantize_experts_and_a_batch_ends_before_it_grows_too_large(self):
        stacked = [(f"{EXPERTS}.gate_up_proj", WEIGHTS[f"{EXPERTS}.gate_up_proj"])]
        two_experts = 2 * 256 * 128 * 2
        for batch_bytes, tensors, calls in ((1 << 28, WEIGHTS.items(), [10]), (two_experts, stacked, [4, 2])):
            quantizer = recording(converter := Converter(RECIPE, batch_bytes=batch_bytes))
            list(converter.convert(tensors))
            assert [len(devices) for devices in quantizer.calls] == calls

    def test_a_batch_lies_on_one_device(self):
        converter = Converter(RECIPE)
        quantizer = recording(converter)
        devices = ("cpu", "cpu", "meta", "cpu")
        list(converter.convert(("q", torch.zeros(2, 2, device=device)) for device in devices))
        assert quantizer.calls == [["cpu", "cpu"], ["meta"], ["cpu"]]

    def test_at_most_one_batch_of_tensors_is_in_memory(self, looked_at_together):
        memory, alive = Memory(), []

        def tensors() -> Iterator[Named]:
            for i in range(12):
                yield f"norm{i}", memory.tensor(torch.full((4, 4), float(i)))
                alive.append(memory.alive)

        for _ in Converter(RECIPE, batch_bytes=3 * 64).convert(tensors()):
            pass
        # what is asked is kept until it is answered
        assert len(alive) == 12 and max(alive) == (12 if looked_at_together == "asked at the end" else 3)

    def test_a_tensor_larger_than_a_batch_is_freed_before_the_next(self):
        memory, alive = Memory(), []

        def tensors() -> Iterator[Named]:
            for name in (f"{EXPERTS}.gate_up_proj", f"{EXPERTS}.down_proj"):
                yield name, memory.tensor(WEIGHTS[name])
                alive.append(memory.alive)

        assert len(list(Converter(RECIPE, batch_bytes=1000).convert(tensors()))) == 18
        assert alive == [0, 0]

    def test_parameters_that_require_grad_are_taken(self):
        stored = dict(Converter(RECIPE).convert([("q", torch.nn.Parameter(WEIGHTS["q"]))]))
        assert not stored["q_scale_inv"].requires_grad


def with_value(tensor: torch.Tensor, index: tuple[int, ...], value: float) -> torch.Tensor:
    copy = tensor.clone()
    copy[index] = value
    return copy


CODES, SCALES = quantize_blockwise(WEIGHTS["q"])
INT8_CODES, INT8_SCALES = INT8_CHANNEL.quantize(WEIGHTS["q"])
FP8_CODES, FP8_SCALES = FP8_CHANNEL.quantize(WEIGHTS["q"])
NAN, INF = float("nan"), float("inf")
NOT_POSITIVE, NOT_NORMAL = "scale that is not a positive number", "that fp32 cannot hold as a normal number"
REFUSED: list[tuple[TrainerRecipe, str, torch.Tensor, tuple[int, int], float, str]] = [
    (RECIPE, "q", CODES, (4, 9), NAN, "a code for NaN"),
    (FP8_BY_CHANNEL, "q", FP8_CODES, (3, 7), NAN, "a code for NaN"),
    (INT8, "q", INT8_CODES, (3, 7), -128, "a code beyond those that are symmetric"),
    *[(RECIPE, "q_scale_inv", SCALES, (1, 0), value, f"a block {NOT_POSITIVE}") for value in (0.0, -1.0, NAN, INF)],
    (INT8, "q_scale", INT8_SCALES, (2, 0), 0.0, f"a channel {NOT_POSITIVE}"),
    *[(RECIPE, "q_scale_inv", SCALES, (1, 0), value, "a block scale above 7.566e+35") for value in (3e38, 7.6e35)],
    (
        FP8_BY_CHANNEL,
        "q_scale",
        FP8_SCALES,
        (2, 0),
        1e37,
        "a channel scale above 7.566e+35, which no BF16 weight needs",
    ),
    *[(RECIPE, "q_scale_inv", SCALES, (1, 0), value, NOT_NORMAL) for value in (1e-39, 2.0**-149)],
    (POWERS, "q_scale_inv", torch.tensor([[2.0**-20, 1.0], [4.0, 2.0**-120]]), (1, 0), 0.75, "no power of two"),
]


class TestRefused:
    @pytest.mark.parametrize(("recipe", "name", "sound", "index", "value", "complaint"), REFUSED)
    def test_the_first_code_or_scale_that_no_weight_has_is_named(self, recipe, name, sound, index, value, complaint):
        [(_, kept)] = Converter(recipe).convert([(name, sound)])
        assert torch.equal(kept.float(), sound.float())
        words = rf"{name}\[{index[0]}, {index[1]}\] is {re.escape(f'{value:g}')}, .*{re.escape(complaint)}"
        with pytest.raises(QuantizationError, match=words) as refused:
            list(Converter(recipe).convert([(name, with_value(with_value(sound, (-1, -1), value), index, value))]))
        assert refused.value.detail == {"tensor": name, "index": list(index), "count": 2}

    @pytest.mark.parametrize("kind", ["fp32", "power_of_two"])
    @pytest.mark.parametrize("weight", [torch.finfo(torch.bfloat16).max, 1e-38, 0.0])
    def test_scales_of_extreme_but_quantizable_weights_are_accepted(self, kind, weight):
        codes, scales = quantize_blockwise(
            torch.full((130, 200), weight).bfloat16(), power_of_two=kind == "power_of_two"
        )
        stored = dict(
            Converter(RECIPE.model_copy(update={"scales": kind})).convert([("q", codes), ("q_scale_inv", scales)])
        )
        assert torch.equal(stored["q_scale_inv"], scales)

    @pytest.mark.parametrize(("form", "recipe"), [(INT8_CHANNEL, INT8), (FP8_CHANNEL, FP8_BY_CHANNEL)])
    def test_codes_and_scales_of_channels_stand_under_the_names_of_compressed_tensors(self, form, recipe):
        converter = Converter(recipe)
        stored = dict(converter.convert(WEIGHTS.items()))
        codes, scales = form.quantize(WEIGHTS["q"])
        assert stored["q"].dtype == form.dtype and torch.equal(stored["q"].float(), codes.float())
        assert torch.equal(stored["q_scale"], scales)
        up = f"{EXPERTS}.2.up_proj.weight"
        of_up = form.quantize(WEIGHTS[f"{EXPERTS}.gate_up_proj"][2, 128:])[0]
        assert torch.equal(stored[up].float(), of_up.float())
        assert stored[f"{up}_scale"].shape == (128, 1)
        sent = [UploadTensor(name=n, dtype="bfloat16", shape=tuple(w.shape)) for n, w in WEIGHTS.items()]
        table = converter.table(sent)
        assert {t.name: (getattr(torch, t.dtype), t.shape) for t in table} == {
            name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in stored.items()
        }
        assert dict(Converter(recipe).convert(stored.items())).keys() == stored.keys()

    @pytest.mark.parametrize(
        ("recipe", "name", "codes", "becomes"),
        [
            (INT8, "q", "float8_e4m3fn", "int8"),
            (RECIPE, "q", "int8", "float8_e4m3fn"),
            (RECIPE, "embed", "float8_e4m3fn", "bfloat16"),
        ],
    )
    def test_codes_of_another_format_or_of_what_is_not_quantized_are_refused(self, recipe, name, codes, becomes):
        with pytest.raises(InvalidManifest, match=rf"{name} came as .*{codes} codes, but it becomes {becomes} here"):
            list(Converter(recipe).convert([(name, torch.zeros(2, 2).to(getattr(torch, codes)))]))

    @pytest.mark.parametrize("name", ["q", "embed", f"{EXPERTS}.down_proj", "bias"])
    @pytest.mark.parametrize("value", [float("nan"), float("-inf")])
    def test_what_is_not_finite_is_named(self, name, value):
        broken = WEIGHTS[name].clone()
        broken[(0,) * broken.dim()] = value
        stored = f"{EXPERTS}.0.down_proj.weight" if name.startswith(EXPERTS) else name
        with pytest.raises(QuantizationError, match=rf"{re.escape(stored)}\[.*\] is {value}"):
            list(Converter(RECIPE).convert([(name, broken)]))

    def test_the_table_keeps_unquantizable_tensors_as_they_were_sent(self):
        odd = (
            UploadTensor(name="q", dtype="bfloat16", shape=(130,)),
            UploadTensor(name=f"{EXPERTS}.down_proj", dtype="float8_e4m3fn", shape=(3, 128, 128)),
        )
        assert tuple(Converter(RECIPE).table(odd)) == odd
