"""Models of the released shapes with random weights, made on the device in place of a download.

Which tensors there are is what the recipe base2-published writes from the release. Weights pass
through the same preparation and plan as a checkpoint's: speed and memory are those of the real
model, and nothing it says means anything.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from emberbox.chat.detokenizer import Detokenizer
from emberbox.chat.tokenizer import Tokenizer
from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.recipe import load_recipe
from emberbox.device import Device
from emberbox.engine.core import Engine
from emberbox.engine.decode_once import decode_once, prepare_once
from emberbox.engine.loading import Loaded, has_graphs
from emberbox.engine.memory_plan import MemoryPlan, plan_memory
from emberbox.errors import SettingsError
from emberbox.formats.base import QuantTensor
from emberbox.model.config import Glm5NextConfig
from emberbox.model.layers import Operand
from emberbox.model.moe import MixtureOfExperts
from emberbox.model.network import Network
from emberbox.model.parameters import Kind, Parameter, parameter_table
from emberbox.model.weights import Assignment, Placement, assign
from emberbox.ops.prepared import PREPARED
from emberbox.ops.table import bind_all
from emberbox.settings import EngineSettings
from emberbox.store.safetensors_header import TensorInfo, num_data_bytes
from emberbox.testing.synthetic_config import CONFIGS, config_json
from emberbox.testing.synthetic_values import Values

RECIPE = "base2-published"
NOTE = "made, not loaded"
_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True, slots=True)
class Model:
    """What there is to make: a config, the headers of a file, and which parameter each fills."""

    config: Glm5NextConfig
    headers: Mapping[str, TensorInfo]
    assignment: Assignment


def model_of(name: str) -> Model:
    """The model called `name`, without a byte of it. Raises SettingsError for an unknown name."""
    if name not in CONFIGS:
        raise SettingsError(
            f"{name!r} is not a model that can be made", hint=f"expected {' or '.join(CONFIGS)}"
        )
    config = Glm5NextConfig.from_dict(config_json(name))
    released = {p.name: _header(p.name, _dtype(p), p.shape) for p in parameter_table(config)}
    plan = plan_conversion(config, released, load_recipe(RECIPE))
    written = (spec for item in plan.items for spec in item.outputs)
    headers = {spec.name: _header(spec.name, spec.dtype, spec.shape) for spec in written}
    return Model(config, headers, assign(config, headers))


def _dtype(parameter: Parameter) -> str:
    """As the release in BF16 has it."""
    return "F32" if parameter.kind is Kind.FP32 else "BF16"


def _header(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    stop = num_data_bytes(dtype, shape) or 0
    return TensorInfo(name, dtype, shape, Path("synthetic", "model.safetensors"), 0, stop)


def synthetic_network(name: str, settings: EngineSettings, *, seed: int = 0) -> Loaded:
    """The model called `name` with weights drawn from `seed`, on the device of `settings`.

    While it is made no more than about 2 GB are held beside the weights. Formats that no kernel of
    the device reads are decoded. Raises SettingsError, EnvironmentProblem or MemoryRefused before
    a weight is made.
    """
    found = Device.detect(settings.device)
    device, model = torch.device(found.torch_name), model_of(name)
    dtype = torch.float32 if _is_wide(settings.dtype, device) else torch.bfloat16
    ops = bind_all(device, found.capability or (0, 0))
    kept = frozenset(filter(ops.reads, model.assignment.quantised_formats))
    graphs = has_graphs(device, ops, model.config, model.assignment, kept)
    memory = _plan(model, found.free_memory_bytes(), dtype, settings, kept, graphs)
    params = make_parameters(model.assignment, Values(device, seed), dtype, ops.ready)
    params = prepare_once(decode_once(params, dtype, NOTE, kept=(*kept, PREPARED.name)), ops)
    network = Network(model.config, params, ops)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was drawn to be prepared
    return Loaded(network, memory)


def synthetic_engine(name: str, settings: EngineSettings, *, seed: int = 0) -> Engine:
    """An engine over such a network; its replies have tokens and no text."""
    loaded = synthetic_network(name, settings, seed=seed)
    return Engine(loaded.network, loaded.memory, _silent)


def _is_wide(name: str, device: torch.device) -> bool:
    return name == "float32" or (name == "auto" and device.type == "cpu")


def _plan(
    model: Model,
    available_bytes: int,
    dtype: torch.dtype,
    settings: EngineSettings,
    kept: frozenset[str],
    graphs: bool,
) -> MemoryPlan:
    decoded = bool(model.assignment.quantised_formats - kept)
    weight_bytes = model.assignment.loaded_bytes(dtype.itemsize, decoded=decoded, kept=kept)
    plan = plan_memory(
        model.config,
        weight_bytes=weight_bytes,
        available_bytes=available_bytes,
        dtype=dtype,
        settings=settings,
        is_prepared=bool(kept),
        has_graphs=graphs,
    )
    return replace(plan, lines=(replace(plan.lines[0], note=NOTE), *plan.lines[1:]))


def make_parameters(
    assignment: Assignment,
    values: Values,
    dtype: torch.dtype,
    ready: Callable[[QuantTensor], QuantTensor],
) -> dict[str, Operand]:
    """What `load_parameters` would read: parameter name -> operand, quantised ones made `ready`.

    The same projection of all experts of a layer is drawn and made ready at once.
    """
    params: dict[str, Operand] = {}
    for alike in _groups(assignment.placements):
        first = alike[0].pieces[0]
        names = [placement.target.name for placement in alike]
        if first.is_quantised:
            out_features, in_features = first.parameter.shape
            num_words = first.infos["trellis"].shape[-1]
            shape = (out_features, in_features)
            made = values.trellis(len(alike), shape, num_words, ready)
            params.update(zip(names, made, strict=True))
            continue
        is_wide = first.parameter.kind in (Kind.FP32, Kind.WIDENED)
        own = torch.promote_types(dtype, torch.float32) if is_wide else dtype
        for placement in alike:
            params[placement.target.name] = values.plain(
                placement.target.name, placement.target.shape, own
            )
    return params


def _groups(placements: Sequence[Placement]) -> Iterator[list[Placement]]:
    """Placements that differ in the number of their expert only."""
    groups: dict[str, list[Placement]] = {}
    for placement in placements:
        groups.setdefault(_EXPERT.sub(".experts.", placement.target.name), []).append(placement)
    return iter(groups.values())


def resident_bytes(params: Mapping[str, Operand]) -> int:
    """Bytes of all operands."""
    return sum(
        value.num_bytes if isinstance(value, QuantTensor) else value.nbytes
        for value in params.values()
    )


@torch.inference_mode()
def mean_distinct_experts(network: Network, token_ids: Sequence[int], num_tokens: int = 8) -> float:
    """Experts that the last `num_tokens` of a sequence are routed to: the mean over the layers."""
    layers = [layer.mlp for layer in network.layers if isinstance(layer.mlp, MixtureOfExperts)]
    counts: list[int] = []
    ops = network.ops

    def route(*args: object) -> tuple[Tensor, Tensor]:
        chosen, weights = ops.route_topk(*args)
        counts.append(torch.unique(chosen[-num_tokens:]).numel())
        return chosen, weights

    try:
        for mlp in layers:
            mlp.ops = replace(ops, route_topk=route)
        device = network.embedding.device
        network.full(torch.tensor([list(token_ids)], device=device))
    finally:
        for mlp in layers:
            mlp.ops = ops
    return sum(counts) / len(counts)


class _NoText:
    """Stands for a tokenizer where nobody reads the text."""

    markup_ids: frozenset[int] = frozenset()

    def token_bytes(self, token: int, *, keep: frozenset[int]) -> bytes:
        return b""


def _silent() -> Detokenizer:
    return Detokenizer(cast(Tokenizer, _NoText()))
