"""A made model is what a loader would demand, repeats by its seed, and runs."""

import time
from itertools import pairwise

import pytest
import torch

from emberbox.engine.core import Engine
from emberbox.engine.request import Prompt, SamplingParams
from emberbox.errors import MemoryRefused, SettingsError
from emberbox.formats.base import QuantTensor
from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.model.network import Network
from emberbox.model.parameters import Kind
from emberbox.model.weights import assign, parameters_from_dict
from emberbox.ops.prepared import PREPARED, prepared
from emberbox.ops.table import OpTable
from emberbox.settings import EngineSettings
from emberbox.store.safetensors_header import num_data_bytes
from emberbox.testing.synthetic import (
    make_parameters,
    mean_distinct_experts,
    model_of,
    resident_bytes,
    synthetic_engine,
    synthetic_network,
)
from emberbox.testing.synthetic_config import FULL, TINY, config_json
from emberbox.testing.synthetic_values import Values
from tests.helpers.published import LAYOUTS, entries
from tests.helpers.released import MTP, released_config, released_infos

CPU, META = torch.device("cpu"), torch.device("meta")
SETTINGS = EngineSettings(device="cpu", max_model_len=512)
EXPERT = "model.language_model.layers.4.mlp.experts.{}.{}_proj.weight"


def as_stored(weight):
    return weight


def made(name=TINY, seed=0, dtype=torch.bfloat16, ready=as_stored):
    return make_parameters(model_of(name).assignment, Values(CPU, seed), dtype, ready)


def stored(params):
    """The operands as tensors of a checkpoint, by name."""
    tensors = {}
    for name, value in params.items():
        if isinstance(value, QuantTensor):
            prefix = name.removesuffix(".weight")
            tensors |= {
                prefix + value.format.parts[part].suffix: tensor
                for part, tensor in value.parts.items()
            }
        else:
            is_conv = name.endswith("conv1d.weight")  # in memory without its axis of one
            tensors[name] = value.unsqueeze(1) if is_conv else value
    return tensors


@pytest.fixture(scope="module")
def tiny():
    return made()


@pytest.fixture(scope="module")
def full():
    return model_of(FULL)


@pytest.fixture(scope="module")
def engine():
    return synthetic_engine(TINY, SETTINGS)


# -- released size ---------------------------------------------------------------------------------


def test_the_full_config_is_the_released_one():
    assert config_json(FULL) == released_config(fp8=False)


def test_the_full_model_has_the_published_tensors_and_bytes(full):
    plain = {name: (info.dtype, info.shape) for name, info in released_infos(fp8=False).items()}
    published = entries(LAYOUTS["whole-2.05"], plain, MTP)
    expected = {header for entry in published for header in entry.headers("mul1")}
    assert {(h.name, h.dtype, h.shape) for h in full.headers.values()} == expected
    sizes = [num_data_bytes(h.dtype, h.shape) for h in full.headers.values()]
    assert (len(sizes), sum(sizes)) == (151_554, 85_128_745_176)
    assert [h.stop - h.start for h in full.headers.values()] == sizes


def test_the_full_model_takes_its_bytes_with_memory_for_every_expert(full):
    """On "meta", where a tensor has a size and no values: every call but the bytes."""
    params = make_parameters(full.assignment, Values(META, 0), torch.bfloat16, prepared)
    experts = [v for name, v in params.items() if ".mlp.experts." in name]
    assert len(experts) == 37_152
    assert {weight.format for weight in experts} == {PREPARED}
    assert sum(weight.num_bytes for weight in experts) == 37_152 * (4096 * 2048 // 4 + 2 * 6144 + 4)
    assert resident_bytes(params) >= 83e9
    assert {p.target.name for p in full.assignment.placements} == params.keys()


# -- the tiny one ----------------------------------------------------------------------------------


def test_what_is_made_is_what_the_loader_demands(tiny):
    model, tensors = model_of(TINY), stored(tiny)
    spare = {info.name for info in model.assignment.spare}
    assert len(spare) == 2 * 2  # of each block of the tower: q, k, v fused beside the split ones
    assert tensors.keys() == model.headers.keys() - spare
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == model.headers[name].shape, name
    kinds = {p.target.name: p.pieces[0].parameter.kind for p in model.assignment.placements}
    tags = {n: DTYPE_TAGS[v.dtype] for n, v in tiny.items() if not isinstance(v, QuantTensor)}
    wide = {name for name, kind in kinds.items() if kind in (Kind.FP32, Kind.WIDENED)}
    assert {name for name, tag in tags.items() if tag == "F32"} == wide
    assert set(tags.values()) == {"F32", "BF16"}
    again = parameters_from_dict(model.config, tensors, dtype=torch.bfloat16)
    assert again.keys() == tiny.keys()


def test_each_expert_has_words_and_memory_of_its_own(tiny):
    weights = [tiny[EXPERT.format(e, p)] for e in range(16) for p in ("gate", "up", "down")]
    for part in ("trellis", "suh", "svh"):
        tensors = [weight.parts[part] for weight in weights]
        assert all(tensor.is_contiguous() for tensor in tensors)
        starts = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
        assert all(a[1] <= b[0] for a, b in pairwise(starts))
        assert len({tuple(tensor.flatten().tolist()) for tensor in tensors}) == len(tensors)


def test_prepared_at_once_is_prepared_one_by_one(tiny):
    together = made(ready=prepared)
    for name, weight in tiny.items():
        if isinstance(weight, QuantTensor):
            alone = prepared(weight)
            assert together[name].format is PREPARED
            assert together[name].parts.keys() == alone.parts.keys()
            for part, tensor in alone.parts.items():
                assert torch.equal(together[name].parts[part], tensor), (name, part)


def test_one_seed_repeats_and_two_differ(tiny):
    again, other = stored(made()), stored(made(seed=1))
    fixed = ("norm.weight", "norm1.weight", "norm2.weight", ".bias", "_base", "_scale", ".mul1")
    for name, tensor in stored(tiny).items():
        assert torch.equal(tensor, again[name]), name
        is_drawn = not name.endswith(fixed) or name.endswith("e_score_correction_bias")
        assert torch.equal(tensor, other[name]) != is_drawn, name


@pytest.mark.parametrize("seed", [-1, 1 << 64, 10**26])
def test_a_seed_that_no_generator_takes_is_refused(seed):
    for device in (CPU, torch.device("meta")):
        with pytest.raises(SettingsError, match=f"seed: {seed}"):
            Values(device, seed)
    with pytest.raises(SettingsError, match=f"seed: {seed}"):
        synthetic_engine(TINY, SETTINGS, seed=seed)
    assert Values(CPU, (1 << 64) - 1).generator.initial_seed() == (1 << 64) - 1


def test_every_bit_of_a_trellis_is_drawn():
    words = Values(CPU, 0).words((64, 64, 32))
    bits = (words.int().unsqueeze(-1) >> torch.arange(16)) & 1
    assert (bits.float().mean((0, 1, 2)) - 0.5).abs().max() < 0.01


@pytest.mark.parametrize("num_words", [32, 48, 64, 80], ids="{} words".format)
def test_products_of_unit_inputs_are_about_unit(num_words):
    weight = Values(CPU, 0).trellis(2, (384, 256), num_words, as_stored)[1]
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    assert 0.8 < (x @ weight.decode().T).std() < 1.4


def test_a_network_of_it_gives_finite_logits_and_routes_evenly(tiny):
    config = model_of(TINY).config
    network = Network(config, made(dtype=torch.float32), OpTable.reference())
    ids = torch.randint(480, (1, 65), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = network.full(ids)
    assert logits.shape == (1, 65, 512)
    assert 0.5 < logits.std() < 2.0
    assert logits.argmax(-1).unique().numel() > 20  # it does not say one thing whatever it reads
    even = 16 * (1 - (1 - 4 / 16) ** 8)
    assert 0.9 * even < mean_distinct_experts(network, ids[0].tolist()) <= 16
    assert all(layer.mlp.ops is network.ops for layer in network.layers[1:])


def test_distinct_experts_are_those_of_the_last_tokens(engine):
    network = engine.runner.network
    assert mean_distinct_experts(network, [7, 8, 9], num_tokens=1) == 4


def test_an_engine_over_it_answers_with_tokens_and_without_text(engine):
    assert isinstance(engine, Engine)
    engine.submit(0, Prompt((1, 2, 3)), SamplingParams(max_tokens=5, ignore_eos=True))
    events = [event.event for _ in range(5) for event in engine.step()]
    assert len({event.token_id for event in events}) > 1
    assert all(0 <= event.token_id < 512 and event.text == "" for event in events)
    assert events[-1].finish == "length"
    assert engine.memory.lines[0].note == "made, not loaded"
    network = engine.runner.network
    assert network.mtp is not None
    assert network.vision is not None


def test_the_loader_finds_a_tensor_that_is_not_made(full):
    """So that the comparison above is one: without one header the model is refused."""
    headers = dict(model_of(TINY).headers)
    del headers[EXPERT.format(3, "up").replace(".weight", ".svh")]
    with pytest.raises(Exception, match=r"experts\.3\.up_proj\.svh: missing"):
        assign(model_of(TINY).config, headers)


def test_an_unknown_name_and_too_little_memory_are_refused():
    with pytest.raises(SettingsError, match=r"'glm-6' is not a model that can be made"):
        model_of("glm-6")
    with pytest.raises(MemoryRefused):
        synthetic_engine(TINY, EngineSettings(device="cpu", snapshot_bytes=2**49))


@pytest.mark.gpu
def test_on_a_gpu_it_is_prepared_and_its_logits_are_finite():
    settings = EngineSettings(device="cuda", max_model_len=512)
    network = synthetic_engine(TINY, settings).runner.network
    weights = [w for expert in network.layers[1].mlp.experts for w in expert]
    assert {weight.format for weight in weights} == {PREPARED}
    ids = torch.randint(480, (1, 65), generator=torch.Generator().manual_seed(2))
    with torch.inference_mode():
        logits = network.full(ids.cuda())
    assert bool(logits.isfinite().all())
    assert 0.5 < logits.std().item() < 2.0


@pytest.mark.gpu
@pytest.mark.slow
def test_the_full_model_is_made_in_20_seconds_and_routes_evenly():
    """Needs 100 GB of GPU memory."""
    settings = EngineSettings(device="cuda", max_model_len=4096, snapshot_bytes=0)
    torch.cuda.init()
    began = time.perf_counter()
    loaded = synthetic_network(FULL, settings)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    held, most = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert held >= 83e9
    assert most - held < 2e9
    assert seconds < 20
    ids = torch.randint(150_000, (256,), generator=torch.Generator().manual_seed(2)).tolist()
    assert mean_distinct_experts(loaded.network, ids) >= 54
