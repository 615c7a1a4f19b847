"""Whole sequences without a cache: the network against transformers."""

import torch
from safetensors.torch import load_file, save_file

from emberbox.model.batch import Batch, Span
from tests.oracle.harness import TABLES, difference, load_network


def test_text_logits_agree(oracle, any_network):
    for length in (1, 3, 4, 5, 36, 139):
        ids = oracle.token_ids(length)
        oracle.check(any_network.full(ids[None])[0], ids)


def test_logits_agree_far_past_the_selection_budget(oracle, any_network):
    ids = oracle.token_ids(301, seed=1)  # 75 complete pools compete for 8 places
    oracle.check(any_network.full(ids[None])[0], ids)


def test_rows_of_a_batch_do_not_see_each_other(oracle, network):
    first, second = oracle.token_ids(77, seed=2), oracle.token_ids(77, seed=3)
    logits = network.full(torch.stack([first, second]))
    oracle.check(logits[0], first)
    oracle.check(logits[1], second)


def test_hidden_states_agree_before_the_head(oracle, network):
    ids = oracle.token_ids(139)
    hidden = network.forward(Batch(ids, (Span(0, 139, 0, 0, ()),)), None)
    assert difference(hidden, oracle.run(ids).hidden) <= oracle.tolerance


def test_gradients_of_the_loss_agree(oracle, network):
    """Training and calibration differentiate this network; a detached path would go unnoticed."""
    ids = oracle.token_ids(45, seed=4)
    name = "layers.0.input_layernorm.weight"
    weight = network.layers[0].attention_hc.norm.weight
    theirs = dict(oracle.model.model.language_model.named_parameters())[name]
    grads = []
    with torch.inference_mode(False), torch.enable_grad():
        ids, targets = ids.clone(), ids.roll(-1)
        for parameter, forward in (
            (weight, lambda: network.full(ids[None])[0]),
            (theirs, lambda: oracle.model(input_ids=ids[None]).logits[0]),
        ):
            parameter.requires_grad_(True)
            loss = torch.nn.functional.cross_entropy(forward(), targets)
            grads.append(torch.autograd.grad(loss, parameter)[0])
            parameter.requires_grad_(False)
    ours, expected = grads
    assert float(expected.norm()) > 1e-3
    assert float((ours - expected).norm() / expected.norm()) < 1e-3


def test_fused_tensors_give_the_same_logits(oracle, tmp_path):
    """q, k, v and their convolutions in one tensor each, as other tools write them."""
    stored = load_file(oracle.folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("self_attn.q_conv1d.weight")]:
        for leaf, fused in (("conv1d", "conv1d"), ("proj", "qkv_proj")):
            at = name.removesuffix("q_conv1d.weight")
            pieces = [stored.pop(f"{at}{x}_{leaf}.weight") for x in "qkv"]
            stored[f"{at}{fused}.weight"] = torch.cat(pieces)
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((oracle.folder / "config.json").read_bytes())
    ids = oracle.token_ids(75)
    oracle.check(load_network(tmp_path, TABLES["cpu"]()).full(ids[None])[0], ids)
