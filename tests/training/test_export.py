"""An exported run is a checkpoint in the released layout that computes what was trained."""

import json

import pytest
import torch

from emberbox.errors import EmberboxError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import bind_all
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.verification import verify_folder
from tests.training.nano_runs import context, rough_parameters, tiny_json
from training.context import Rows
from training.export import ASSETS, MAX_SHARD_BYTES, checkpoint_tensors, copy_assets, export
from training.network import TrainingNetwork
from training.parameters import initial, stacked
from training.shape import EOS_IDS, SPECIAL_TOKENS, TOKEN, config_json

CONFIG = Glm5NextConfig.from_dict(tiny_json())


def load(folder, dtype=torch.float32):
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    params = load_parameters(
        checkpoint, assign(config, checkpoint.tensors), device="cpu", dtype=dtype
    )
    return config, params


@torch.no_grad()
def test_exported_checkpoint_gives_the_logits_of_the_rounded_parameters(tmp_path):
    params = rough_parameters(CONFIG)
    size = export(params, tiny_json(), tmp_path)
    config, operands = load(tmp_path)
    assert size == sum(i.num_bytes for i in open_checkpoint(tmp_path).tensors.values())
    rounded = stacked(checkpoint_tensors(CONFIG, params))
    trained = TrainingNetwork(context(CONFIG, rounded))
    ids = torch.randint(10, 490, (1, 96))
    rows = Rows(1, 96, torch.ones(96), torch.zeros(()))
    found = trained.logits(trained.trunk(ids, None, rows).hidden)
    expected = Network(config, operands, bind_all(torch.device("cpu"))).full(ids)[0]
    assert (found - expected).abs().max() < 1e-4


def test_what_the_release_keeps_wide_stays_wide_and_the_bias_is_not_rounded(tmp_path):
    params = rough_parameters(CONFIG)
    export(params, tiny_json(), tmp_path)
    infos = open_checkpoint(tmp_path).tensors
    wide = {name.rsplit(".", 1)[-1] for name, info in infos.items() if info.dtype == "F32"}
    assert wide == {
        "e_score_correction_bias",
        "A_log",
        "dt_bias",
        *(f"hc_{half}_{part}" for half in ("attn", "ffn") for part in ("base", "scale")),
    }
    assert {info.dtype for info in infos.values()} == {"F32", "BF16"}
    name = "model.language_model.layers.1.mlp.gate.e_score_correction_bias"
    _, operands = load(tmp_path)
    assert torch.equal(operands[name], params[name])


def test_nano_fits_its_sizes(tmp_path):
    params = initial(Glm5NextConfig.from_dict(config_json()), 0)
    size = export(params, config_json(), tmp_path)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert size <= 24_000_000
    assert len(shards) <= 4
    assert max(file.stat().st_size for file in shards) <= 8_000_000
    assert MAX_SHARD_BYTES < 8_000_000
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == EOS_IDS


def test_an_exported_folder_has_digests_of_its_tensors(tmp_path):
    for seed in (0, 1):
        export(initial(CONFIG, seed), tiny_json(), tmp_path)
    verdict = verify_folder(tmp_path)
    assert (verdict.num_tensors, verdict.faults) == (len(open_checkpoint(tmp_path).tensors), ())


def test_export_replaces_weights_that_were_there(tmp_path):
    for seed in (0, 1):
        params = initial(CONFIG, seed)
        export(params, tiny_json(), tmp_path)
    _, operands = load(tmp_path, torch.bfloat16)
    assert torch.equal(operands["lm_head.weight"], params["lm_head.weight"].bfloat16())


def test_a_value_that_is_not_finite_is_refused(tmp_path):
    params = initial(CONFIG, 0)
    params["lm_head.weight"][3, 4] = float("nan")
    with pytest.raises(EmberboxError, match="lm_head"):
        export(params, tiny_json(), tmp_path)


def test_missing_assets_are_all_named(tmp_path):
    (tmp_path / ASSETS[0]).write_text("{}")
    with pytest.raises(FileNotFoundError, match=", ".join(ASSETS[1:])):
        copy_assets(tmp_path, tmp_path / "to")


def test_special_tokens_keep_the_released_order():
    assert len(SPECIAL_TOKENS) == 36
    released = {"<|user|>": 154827, "<think>": 154841, "<tool_call>": 154843, "<|image|>": 154854}
    assert {name: TOKEN[name] + 150764 for name in released} == released
    assert [TOKEN[n] for n in ("<|endoftext|>", "<|user|>", "<|observation|>")] == EOS_IDS
