"""What kernels hold beside the parameters is found, and bound to the live parameters after vLLM's own reload."""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)

from rollout_service.engine.loading.rebind import Held, Unbound, bind_to_parameters, held_tensors


@dataclass
class Description:
    scale: torch.Tensor | None = None


@dataclass
class Kernel:
    """As vLLM's for experts: it reads the codes from the layer at each call, and keeps the scales that it was given."""

    first: Description
    second: Description = field(default_factory=Description)
    more: Any = None


class Method(QuantizeMethodBase):
    """Makes its kernel anew whenever weights were loaded."""

    def __init__(self, derived: bool = False) -> None:
        self._derived = derived

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        for name in ("weight", "scale"):
            parameter = torch.nn.Parameter(torch.zeros(2, 3), requires_grad=False)
            parameter.weight_loader = lambda param, loaded: param.data.copy_(loaded)
            layer.register_parameter(name, parameter)

    def apply(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        return layer.weight * self.kernel.first.scale

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.kernel = Kernel(Description(layer.scale), more=2 * layer.scale if self._derived else None)


class Layer(torch.nn.Module):
    def __init__(self, method: Method) -> None:
        super().__init__()
        self.quant_method = method
        method.create_weights(self)


def started(*methods: Method) -> torch.nn.Module:
    """A model as vLLM has it once it serves."""
    model = torch.nn.Sequential(*map(Layer, methods))
    record_metadata_for_reloading(model)
    for layer in model:
        layer.quant_method.process_weights_after_loading(layer)
    return model


def reload(model: torch.nn.Module) -> list[Held]:
    """With random weights, by vLLM's layerwise reload; returns what was held when it began."""
    initialize_layerwise_reload(model)
    before = list(held_tensors(model))
    for _, parameter in list(model.named_parameters()):
        parameter.weight_loader(parameter, torch.randn(2, 3))
    finalize_layerwise_reload(model, None)
    return before


def test_a_kernel_reads_the_live_parameter_after_it_was_bound():
    model = started(Method(), Method())
    model[0].quant_method.workspace = [torch.randn(7)]  # held before the reload, so it does not matter
    for _ in range(2):  # after each reload there is the same to bind
        before = reload(model)
        layer = model[1]
        layer.scale.data.mul_(2)
        assert not torch.equal(layer.quant_method.apply(layer), layer.weight * layer.scale), "vLLM binds it itself now"
        layer.scale.data.div_(2)
        assert bind_to_parameters(model, before) == 2
        for layer in model:
            layer.scale.data.mul_(2)
            assert torch.equal(layer.quant_method.apply(layer), layer.weight * layer.scale)
            assert layer.quant_method.kernel.first.scale is layer.scale
        assert bind_to_parameters(model, list(held_tensors(model))) == 0


def test_a_scale_without_dimensions_is_compared_too():
    model = started(Method())
    before = reload(model)
    model[0].register_parameter("one", torch.nn.Parameter(torch.tensor(3.0), requires_grad=False))
    model[0].quant_method.one = torch.tensor(3.0)
    assert bind_to_parameters(model, before) == 2
    assert model[0].quant_method.one is model[0].one


def test_what_equals_no_parameter_or_several_is_refused():
    model = started(Method(derived=True))
    with pytest.raises(Unbound, match=r"quant_method\.kernel\.more.*equals 0 parameters"):
        bind_to_parameters(model, reload(model))
    model = started(Method())
    before = reload(model)
    model[0].weight.data.copy_(model[0].scale)
    with pytest.raises(Unbound, match="equals 2 parameters"):
        bind_to_parameters(model, before)


def test_where_nothing_can_be_replaced_it_is_said():
    model = started(Method())
    before = reload(model)
    model[0].quant_method.pair = (model[0].scale.detach().clone(),)
    with pytest.raises(Unbound, match=r"pair\[0\] cannot be bound"):
        bind_to_parameters(model, before)


class Slotted:
    __slots__ = ("other", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def test_tensors_are_found_in_whatever_holds_them():
    model = torch.nn.Linear(2, 2)
    tensors = [torch.full((1,), float(i)) for i in range(6)]
    inner = torch.nn.Linear(1, 1, bias=False)

    def closure() -> torch.Tensor:
        return tensors[4]

    model.anything = {
        "list": [tensors[0], model],
        "slots": Slotted(tensors[1]),
        "partial": functools.partial(torch.add, tensors[2]),
        "method": functools.partial(Kernel(Description(tensors[3])).__eq__),
        "closure": closure,
        "module": inner,
    }
    model.anything["itself"] = model.anything
    model.direct = tensors[5]
    found = {id(held.tensor) for held in held_tensors(model)}
    assert {id(tensor) for tensor in tensors[:5]} | {id(inner.weight)} <= found
    assert not found & {id(model.weight), id(model.bias)}
