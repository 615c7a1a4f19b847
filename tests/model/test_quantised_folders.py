"""Folders in every published layout: they load, compute what their decoded weights say, and every
damage to one is refused by the name of a tensor.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from openai import OpenAI
from rich.console import Console

from emberbox.cli.loading import LoadScreen
from emberbox.cli.local_server import local_server
from emberbox.device import Device
from emberbox.engine import loading
from emberbox.engine.decode_once import decode_once
from emberbox.engine.llm import LLM
from emberbox.engine.loading import load
from emberbox.engine.request import SamplingParams
from emberbox.errors import LoadRefused, MisplacedTensor, TruncatedFile
from emberbox.formats.base import QuantTensor
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters, parameters_from_dict
from emberbox.ops.numerics import relative_error
from emberbox.ops.table import bind_all
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import INDEX_NAME, open_checkpoint
from tests.helpers.published import LAYOUTS
from tests.helpers.quantised_folder import nano_entries, write_quantised

CPU = torch.device("cpu")
TOKENS = torch.arange(37, 37 + 90).view(2, 45) * 29 % 4000
EXPERT = "model.language_model.layers.3.mlp.experts.7.up_proj"
# Fused and split products differ in the order of their sums; nothing else may.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            made[name] = folder, write_quantised(folder, LAYOUTS[name])
        return made[name]

    return make


def opened(folder):
    checkpoint = open_checkpoint(folder)
    return checkpoint, Glm5NextConfig.from_dict(checkpoint.config)


def drafts(network, token_ids):
    spans = (Span(0, len(token_ids), 0, 0, ()),)
    batch = Batch(token_ids, spans)
    hidden = network.forward(batch, None)
    return network.logits(network.draft(hidden, token_ids.roll(-1), batch, None))


@pytest.mark.parametrize("name", LAYOUTS)
def test_logits_are_those_of_the_decoded_weights(name, folder_of):
    folder, decoded = folder_of(name)
    llm = LLM(folder, EngineSettings(dtype="float32", device="cpu"))
    params = parameters_from_dict(llm.config, decoded, dtype=torch.float32)
    expected = Network(llm.config, params, bind_all(CPU))
    with torch.inference_mode():
        logits = expected.full(TOKENS)
        assert logits.std() > 0.01
        assert relative_error(llm.network.full(TOKENS), logits) <= TOLERANCE
        wanted = drafts(expected, TOKENS[0])
        assert relative_error(drafts(llm.network, TOKENS[0]), wanted) <= TOLERANCE
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(3))
        wanted = expected.vision(pixels, [(1, 4, 4)])
        assert relative_error(llm.network.vision(pixels, [(1, 4, 4)]), wanted) <= TOLERANCE


@pytest.mark.parametrize("name", ["whole-2.05", "experts-2-fp8", "nvfp4"])
def test_weights_that_stay_as_stored_compute_the_same(name, folder_of):
    folder, _ = folder_of(name)
    checkpoint = open_checkpoint(folder)
    once = LLM(folder, EngineSettings(dtype="float32", device="cpu")).network
    stored = load_parameters(
        checkpoint, assign(once.config, checkpoint.tensors), device="cpu", dtype=torch.float32
    )
    assert sum(isinstance(value, QuantTensor) for value in stored.values()) > 300
    network = Network(once.config, stored, bind_all(CPU))
    with torch.inference_mode():
        assert torch.equal(network.full(TOKENS[:1, :9]), once.full(TOKENS[:1, :9]))


def test_a_quantised_folder_answers(folder_of):
    folder, _ = folder_of("whole-2.05")
    llm = LLM(folder, EngineSettings(dtype="float32", device="cpu"))
    done = llm.generate("One two", SamplingParams(max_tokens=3, temperature=0.0))
    assert 1 <= len(done[0].token_ids) <= 3


def test_the_nvfp4_folder_has_the_published_files_and_their_contradiction(folder_of):
    folder, _ = folder_of("nvfp4")
    checkpoint = open_checkpoint(folder)
    found = checkpoint.config["quantization_config"]
    assert not any(".layers.8." in name for name in found["ignore"])
    assert len(found["ignore"]) == 3 + 8 + 2 * 7  # of 132: eight layers, the first one dense
    mtp = [name for name in checkpoint.tensors if ".layers.8." in name]
    assert not any("scale" in name for name in mtp if "hc_" not in name)
    own = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
    assert own["quant_algo"] == "MIXED_PRECISION"
    assert {f"{module}.weight_scale" for module in own["quantized_layers"]} == {
        name for name in checkpoint.tensors if name.endswith("weight_scale")
    }
    assert not (folder / "quantization_config.json").exists()


@pytest.mark.parametrize("name", ["whole-2.05", "experts-2-3"])
def test_a_folder_lists_the_tensors_that_it_stores(name, folder_of):
    folder, _ = folder_of(name)
    checkpoint = open_checkpoint(folder)
    listed = json.loads((folder / "quantization_config.json").read_text())
    stored = {
        n: t for m in listed.pop("tensor_storage").values() for n, t in m["stored_tensors"].items()
    }
    assert listed == checkpoint.config["quantization_config"]
    assert {n: (tuple(t["shape"]), t["n_bytes"]) for n, t in stored.items()} == {
        n: (info.shape, info.num_bytes) for n, info in checkpoint.tensors.items()
    }
    assert len({info.file for info in checkpoint.tensors.values()}) > 2


@pytest.mark.parametrize("name", ["whole-2.05", "tiers"])
def test_every_tensor_is_read_or_is_a_plain_copy(name, folder_of):
    folder, _ = folder_of(name)
    checkpoint, config = opened(folder)
    assignment = assign(config, checkpoint.tensors)
    duplicates = {entry.name for entry in nano_entries(LAYOUTS[name]) if entry.is_duplicate}
    assert {info.name for info in assignment.spare} == duplicates
    assert len(duplicates) == 2 * 3
    assert assignment.num_bytes + sum(i.num_bytes for i in assignment.spare) == checkpoint.num_bytes


def test_decoding_once_drops_what_was_stored(folder_of):
    folder, _ = folder_of("experts-2")
    checkpoint, config = opened(folder)
    assignment = assign(config, checkpoint.tensors)
    stored = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.bfloat16)
    once = decode_once(dict(stored), torch.bfloat16, "here")
    assert not any(isinstance(value, QuantTensor) for value in once.values())
    expected = stored[EXPERT + ".weight"].decode().bfloat16()
    assert torch.equal(once[EXPERT + ".weight"], expected)
    more = assignment.loaded_bytes(2, decoded=True) - assignment.loaded_bytes(2)
    held = sum(value.num_bytes for value in stored.values() if isinstance(value, QuantTensor))
    assert more == 8 * 16 * 3 * 128 * 128 * 2 - held


def test_weights_are_decoded_when_the_plan_has_room_and_else_stay_as_stored(folder_of, monkeypatch):
    folder, _ = folder_of("experts-2")
    settings = EngineSettings(
        device="cpu", max_model_len=64, cache_tokens=64, snapshot_bytes=0, max_running=1
    )
    roomy = LLM(folder, settings)
    needed = roomy.memory.total - roomy.memory.lines[-1].num_bytes
    monkeypatch.setattr(Device, "free_memory_bytes", lambda _: int(needed / 0.9) - 100_000)
    tight = LLM(folder, settings)
    weights = [roomy.memory.lines[0].num_bytes, tight.memory.lines[0].num_bytes]
    assert weights[0] > weights[1]
    said = [llm.memory.lines[0].note for llm in (roomy, tight)]
    assert said == ["decoded once, at load", "as they are stored"]
    with torch.inference_mode():
        assert torch.equal(roomy.network.full(TOKENS[:1, :5]), tight.network.full(TOKENS[:1, :5]))


def test_formats_that_a_kernel_reads_are_prepared_and_the_rest_is_decoded(folder_of, monkeypatch):
    """As on a GPU: the op table of one, on a CPU, which can load but not run."""
    folder, _ = folder_of("experts-2-fp8")
    settings = EngineSettings(
        device="cpu", dtype="float32", max_model_len=64, cache_tokens=64, max_running=1
    )
    plain = load(folder, settings)
    table = bind_all(torch.device("cuda"), (9, 0))
    monkeypatch.setattr(loading, "bind_all", lambda *_: table)
    loaded = load(folder, settings)
    line = loaded.memory.lines[0]
    assert line.note == "as they are stored (prepared), the rest decoded once, at load"
    assignment = assign(loaded.network.config, open_checkpoint(folder).tensors)
    assert assignment.quantised_formats == {"exl3", "fp8_block"}
    least, most = (assignment.loaded_bytes(4, decoded=decoded) for decoded in (False, True))
    assert least < line.num_bytes < most == plain.memory.lines[0].num_bytes
    moe = loaded.network.layers[3].mlp
    assert {weight.format.name for expert in moe.experts for weight in expert} == {"exl3_prepared"}
    assert isinstance(moe.shared.gate.weight, torch.Tensor)
    with torch.inference_mode():
        wanted = plain.network.layers[3].mlp.experts[7][1]
        assert torch.equal(moe.experts[7][1].decode(), wanted)


def test_a_weight_that_decodes_beyond_the_activation_type_is_named(folder_of):
    folder, _ = folder_of("experts-2")
    checkpoint, config = opened(folder)
    assignment = assign(config, checkpoint.tensors)
    stored = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)
    weight = stored[EXPERT + ".weight"]
    huge = {"suh": weight.parts["suh"] * 0 + 6e4, "svh": weight.parts["svh"] * 0 + 6e4}
    stored[EXPERT + ".weight"] = QuantTensor(weight.format, weight.parts | huge, weight.shape)
    with pytest.raises(LoadRefused) as caught:
        decode_once(stored, torch.float16, "here")
    assert caught.value.reasons == (
        f"{EXPERT}.weight: decodes to values that torch.float16 cannot hold",
    )


# -- damage --------------------------------------------------------------------------------------


@pytest.fixture
def fresh(tmp_path):
    def make(name):
        write_quantised(tmp_path, LAYOUTS[name])
        return tmp_path

    return make


def overwrite(folder, name, values, dtype):
    """Replace the first elements of a stored tensor."""
    info = open_checkpoint(folder).tensors[name]
    with info.file.open("r+b") as file:
        file.seek(info.start)
        file.write(np.array(values, dtype).tobytes())


def reasons(folder):
    with pytest.raises(LoadRefused) as caught:
        LLM(folder, EngineSettings(device="cpu"))
    return list(caught.value.reasons)


def edit_header(folder, old, new):
    """Change the header of the file that holds EXPERT, keeping its length."""
    path = open_checkpoint(folder).tensors[EXPERT + ".trellis"].file
    raw = path.read_bytes()
    assert raw.count(old) == 1
    assert len(old) == len(new)
    path.write_bytes(raw.replace(old, new))


@pytest.mark.parametrize(
    ("layout", "part", "values", "dtype"),
    [
        ("experts-2", "suh", [1, float("nan")], "<f2"),
        ("experts-2", "svh", [float("-inf")], "<f2"),
        ("nvfp4", "weight_scale", [0x7F], "u1"),
        ("nvfp4", "weight_scale_2", [float("nan")], "<f4"),
        ("nvfp4-reciprocal", "weight_scale", [0xFF], "u1"),
        ("nvfp4-reciprocal", "weight_global_scale", [float("inf")], "<f4"),
    ],
)
def test_scales_that_are_not_finite_are_named(layout, part, values, dtype, fresh):
    folder = fresh(layout)
    overwrite(folder, f"{EXPERT}.{part}", values, dtype)
    assert reasons(folder) == [f"{EXPERT}.{part}: holds NaN or infinity"]


def test_a_global_scale_of_zero_is_named_by_its_weight(fresh):
    folder = fresh("nvfp4-reciprocal")
    overwrite(folder, f"{EXPERT}.weight_global_scale", [0.0], "<f4")
    assert reasons(folder) == [f"{EXPERT}.weight: decodes to values that torch.float32 cannot hold"]


def test_a_truncated_file_is_named_with_both_sizes(fresh):
    folder = fresh("experts-2")
    path = open_checkpoint(folder).tensors[EXPERT + ".trellis"].file
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(TruncatedFile, match=path.name):
        LLM(folder, EngineSettings(device="cpu"))


def test_an_index_that_crosses_two_weights_names_both(fresh):
    folder = fresh("experts-2")
    path = folder / INDEX_NAME
    index = json.loads(path.read_text())
    places = index["weight_map"]
    other = next(
        name
        for name in places
        if name.endswith("up_proj.trellis") and places[name] != places[EXPERT + ".trellis"]
    )
    here = EXPERT + ".trellis"
    places[here], places[other] = places[other], places[here]
    path.write_text(json.dumps(index))
    with pytest.raises(MisplacedTensor) as caught:
        LLM(folder, EngineSettings(device="cpu"))
    assert here in str(caught.value)
    assert other in str(caught.value)


def test_a_tile_grid_that_does_not_fit_is_named(fresh):
    folder = fresh("experts-2")
    # Read as 4 bits a weight, as many bytes make half as many tiles.
    start = f'"{EXPERT}.trellis":{{"dtype":"I16","shape":[8,'.encode()
    edit_header(folder, start + b"8,32]", start + b"4,64]")
    assert reasons(folder) == [f"{EXPERT}.trellis: shape [8, 4, 64], expected [8, 8, any]"]


@pytest.mark.parametrize("num_words", [8, 72, 144])
def test_a_rate_that_does_not_exist_is_named(num_words, folder_of):
    checkpoint, config = opened(folder_of("experts-2")[0])
    infos, name = dict(checkpoint.tensors), EXPERT + ".trellis"
    infos[name] = replace(infos[name], shape=(8, 8, num_words))
    with pytest.raises(LoadRefused) as caught:
        assign(config, infos)
    assert caught.value.reasons == (
        f"{name}: tiles of {num_words} words, expected 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, "
        f"128 (16 for each bit of a weight)",
    )


def test_a_part_under_another_name_is_named_with_what_is_missing(fresh):
    folder = fresh("experts-2")
    edit_header(folder, f'"{EXPERT}.svh"'.encode(), f'"{EXPERT}.sxh"'.encode())
    path = folder / INDEX_NAME
    path.write_text(path.read_text().replace(EXPERT + ".svh", EXPERT + ".sxh"))
    assert reasons(folder) == [
        f"{EXPERT}.svh: missing (part of exl3)",
        f"{EXPERT}.sxh: unknown to this network",
    ]


def test_a_missing_scale_is_named_and_the_other_parts_are_not_called_unknown(folder_of):
    checkpoint, config = opened(folder_of("nvfp4")[0])
    infos = dict(checkpoint.tensors)
    del infos[EXPERT + ".weight_scale_2"]
    with pytest.raises(LoadRefused) as caught:
        assign(config, infos)
    assert caught.value.reasons == (
        f"{EXPERT}.weight: dtype U8, expected BF16 or F16 or F32",
        f"{EXPERT}.weight: shape [128, 64], expected [128, 128]",
        f"{EXPERT}.weight_scale_2: missing (part of nvfp4)",
    )


def test_a_plain_weight_beside_a_quantised_one_is_refused(folder_of):
    folder, decoded = folder_of("experts-2")
    checkpoint, config = opened(folder)
    infos, name = dict(checkpoint.tensors), EXPERT + ".weight"
    infos[name] = replace(infos["lm_head.weight"], name=name, shape=(128, 128))
    with pytest.raises(LoadRefused) as caught:
        assign(config, infos)
    assert caught.value.reasons == (f"{name}: unknown to this network",)
    assert name in decoded


@pytest.mark.parametrize(
    "rename",
    [
        "{at}.rank{rank}.{part}",
        "{at}.slices.{rank}.{part}",
        "{at}.{part}.{rank}",
        "{at}.{part}_tp{rank}",
    ],
)
def test_matrices_sliced_in_advance_are_refused_by_name(rename, folder_of):
    folder, _ = folder_of("experts-2")
    checkpoint, config = opened(folder)
    infos, sliced = dict(checkpoint.tensors), {}
    for name in [name for name in infos if name.startswith(EXPERT)]:
        info = infos.pop(name)
        at, _, part = name.rpartition(".")
        for rank in range(4):
            new = rename.format(at=at, part=part, rank=rank)
            sliced[new] = replace(info, name=new)
    with pytest.raises(LoadRefused) as caught:
        assign(config, infos | sliced)
    why = "a slice, cut in advance for tensor parallel; only whole matrices are read"
    expected = {f"{name}: {why}" for name in sliced} | {f"{EXPERT}.weight: missing"}
    assert set(caught.value.reasons) == expected


@pytest.mark.parametrize("layout", ["whole-2.05", "experts-2", "nvfp4"])
def test_the_server_answers_from_a_published_layout(folder_of, layout):
    folder, decoded = folder_of(layout)
    prompt = [40, 41, 42, 43, 44]
    config = opened(folder)[1]
    params = parameters_from_dict(config, decoded, dtype=torch.float32)
    with torch.inference_mode():
        logits = Network(config, params, bind_all(CPU)).full(torch.tensor([prompt]))[0, -1]
    expected = torch.log_softmax(logits, -1).max()
    settings = EngineSettings(device="cpu", max_model_len=128, snapshot_bytes=0, max_running=1)
    screen = LoadScreen(Console(quiet=True), has_plan=False)
    with local_server(folder, settings, screen) as url:
        reply = OpenAI(base_url=f"{url}/v1", api_key="none").completions.create(
            model=folder.name, prompt=prompt, max_tokens=1, temperature=0, logprobs=1
        )
    assert reply.usage.prompt_tokens == len(prompt)
    (said,) = reply.choices[0].logprobs.token_logprobs
    assert said == pytest.approx(float(expected), abs=1e-4)
