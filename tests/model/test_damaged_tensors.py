"""One changed byte of any stored kind of tensor: every reader refuses it by the tensor's name."""

import json

import pytest
import torch

from emberbox.cli.main import main
from emberbox.compress.pipeline import compress, prepare
from emberbox.compress.recipe import parse_recipe
from emberbox.engine.llm import LLM
from emberbox.errors import DamagedTensor
from emberbox.measure.lanes import load_plain
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.digests import write_digests
from emberbox.store.verification import verify_folder
from tests.compress.test_pipeline import OPTIONS
from tests.helpers.nano import NANO
from tests.helpers.published import LAYOUTS
from tests.helpers.quantised_folder import write_quantised
from tests.helpers.quick_search import quick_search
from tests.measure.tiny_pair import write_panel

LAYER = "model.language_model.layers."
EXPERT = f"{LAYER}3.mlp.experts.7.up_proj"
CASES = [
    ("experts-2-fp8", f"{EXPERT}.trellis", "I16"),
    ("experts-2-fp8", f"{EXPERT}.suh", "F16"),
    ("experts-2-fp8", f"{EXPERT}.mcg", "I32"),
    ("experts-2-fp8", f"{LAYER}3.mlp.shared_experts.up_proj.weight", "F8_E4M3"),
    ("experts-2-fp8", f"{LAYER}3.mlp.shared_experts.up_proj.weight_scale_inv", "F32"),
    ("nvfp4", f"{EXPERT}.weight", "U8"),
    ("nvfp4", f"{EXPERT}.weight_scale", "F8_E4M3"),
    ("nvfp4", f"{EXPERT}.weight_scale_2", "F32"),
    ("nvfp4", "lm_head.weight", "BF16"),
    ("nvfp4", f"{LAYER}3.mlp.gate.e_score_correction_bias", "F32"),
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    made = {}

    def make(layout):
        if layout not in made:
            made[layout] = tmp_path_factory.mktemp(layout)
            write_quantised(made[layout], LAYOUTS[layout])
            write_digests(made[layout])
        return made[layout]

    return make


def flip(info, position=None):
    """Change the lowest bit of a byte of the data; of the middle one, unless another is given."""
    with info.file.open("r+b") as file:
        at = info.start + (info.num_bytes // 2 if position is None else position)
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def damaged(folder_of):
    """A folder with one changed byte in a tensor, which is put back afterwards."""
    flipped = []

    def make(layout, name):
        info = open_checkpoint(folder_of(layout)).tensors[name]
        flip(info)
        flipped.append(info)
        return folder_of(layout), info

    yield make
    for info in flipped:
        flip(info)


@pytest.mark.parametrize("layout", ["experts-2-fp8", "nvfp4"])
def test_an_undamaged_folder_is_good(folder_of, layout):
    folder = folder_of(layout)
    verdict = verify_folder(folder)
    assert verdict.faults == ()
    assert verdict.num_tensors == len(open_checkpoint(folder).tensors)
    LLM(folder, EngineSettings(device="cpu", max_model_len=64))


@pytest.mark.parametrize(("layout", "name", "dtype"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_a_changed_byte_is_refused_by_the_name_of_its_tensor(damaged, layout, name, dtype):
    folder, info = damaged(layout, name)
    assert info.dtype == dtype
    told = rf"{info.file.name}: tensor '{name}' is damaged: .* begins with [0-9a-f]{{32}}, expected"
    with pytest.raises(DamagedTensor, match=told):
        LLM(folder, EngineSettings(device="cpu"))
    with pytest.raises(DamagedTensor, match=told):
        load_plain(folder, "cpu")
    (fault,) = verify_folder(folder).faults
    assert (fault.file, fault.tensors) == (info.file.name, (name,))
    assert fault.what == f"tensor '{name}' is damaged (bytes {info.start} to {info.stop})"


def test_the_first_and_the_last_byte_count_too(folder_of):
    folder = folder_of("nvfp4")
    infos = open_checkpoint(folder).tensors
    first, last = infos["lm_head.weight"], infos[f"{EXPERT}.weight"]
    flip(first, 0)
    flip(last, last.num_bytes - 1)
    try:
        named = {name for fault in verify_folder(folder).faults for name in fault.tensors}
        with pytest.raises(DamagedTensor):
            LLM(folder, EngineSettings(device="cpu"))
    finally:
        flip(first, 0)
        flip(last, last.num_bytes - 1)
    assert named == {first.name, last.name}


def test_without_verification_the_changed_byte_is_loaded(damaged):
    folder, info = damaged("nvfp4", "lm_head.weight")
    settings = EngineSettings(device="cpu", max_model_len=64, verify_weights=False)
    weight = LLM(folder, settings).network.lm_head.weight
    raw = info.file.read_bytes()[info.start : info.stop]
    stored = torch.frombuffer(bytearray(raw), dtype=torch.bfloat16).view(info.shape)
    assert torch.equal(weight, stored.float())


def test_the_verbs_say_it_and_fail(damaged, tmp_path, capsys):
    folder, info = damaged("nvfp4", f"{EXPERT}.weight")
    told = f"tensor '{info.name}' is damaged"
    panel = ["--panel", str(write_panel(tmp_path)), "-o", str(tmp_path / "out.json")]
    for argv in (
        ["serve", str(folder), "--port", "0", "--device", "cpu"],
        ["measure", "fidelity", str(folder), str(NANO), "--device", "cpu", *panel],
    ):
        assert main(argv) == 1
        shown = capsys.readouterr().err
        assert told in shown
        assert "hint: fetch or make this file again" in shown
    assert main(["verify", str(folder)]) == 1
    assert told in capsys.readouterr().out
    assert main(["verify", str(folder), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert [fault["tensors"] for fault in report["faults"]] == [[info.name]]


def test_compress_does_not_take_a_damaged_source(damaged, tmp_path):
    folder, info = damaged("nvfp4", "lm_head.weight")
    recipe = f'[[rule]]\nmatch = ["{LAYER}3.self_attn.o_proj"]\nformat = "fp8_block"\n'
    prepared = prepare(folder, parse_recipe(recipe, "some"), OPTIONS)
    with pytest.raises(DamagedTensor, match=f"tensor '{info.name}' is damaged"):
        compress(prepared, tmp_path / "out", quick_search)
