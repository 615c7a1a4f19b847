"""The whole of `compress` on ember-nano, with a search that is quick and finds poor paths.

What is asked here does not depend on the search: the text moves through what a reader decodes, the
moments are those of the network, and a conversion that is killed ends in the same bytes.
"""

import json
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from types import MappingProxyType

import pytest
import torch

from emberbox.compress import pipeline
from emberbox.compress.encode import Encoder
from emberbox.compress.journal import Journal
from emberbox.compress.pipeline import CompressOptions, compress, prepare
from emberbox.compress.recipe import load_recipe, parse_recipe
from emberbox.compress.source import Source
from emberbox.compress.walk import Walk
from emberbox.errors import CheckpointError, LoadRefused, SettingsError
from emberbox.model.batch import Batch, Span
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.table import OpTable
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import verify_checksums
from emberbox.store.digests import DIGESTS_NAME
from tests.helpers.nano import NANO
from tests.helpers.quick_search import quick_search

ROWS, COLS = 3, 40
OPTIONS = CompressOptions(rows=ROWS, cols=COLS, max_shard_bytes=8_000_000)
LAYER = "model.language_model.layers."
# Every kind of sublayer, little of each: quick, and the whole way is walked all the same.
SOME = """
layout = "exllamav3"
[[rule]]
match = "**.layers.[0358].self_attn.*"
format = "exl3"
bits = 4
[[rule]]
match = ["**.layers.0.mlp.*", "**.layers.2.mlp.shared_experts.*"]
format = "exl3"
bits = 3
[[rule]]
match = ["**.layers.3.mlp.experts.*.*", "**.layers.8.mlp.experts.*.down_proj"]
format = "exl3"
bits = 2
[[rule]]
match = ["**.eh_proj", "lm_head"]
format = "exl3"
bits = 4
"""


def network_of(folder, ops=None):
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)
    return Network(config, params, ops or OpTable.reference())


def rows_as_batch(token_ids):
    spans = tuple(Span(i * COLS, (i + 1) * COLS, 0, i, ()) for i in range(ROWS))
    return Batch(token_ids.flatten(), spans)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, what was prepared, the walk at its end, hidden states before the MTP layer)."""
    folder = tmp_path_factory.mktemp("compressed") / "some"
    prepared = prepare(NANO, parse_recipe(SOME, "some"), OPTIONS)
    seen = {}

    class Watched(Walk):
        def __init__(self, *args):
            super().__init__(*args)
            seen["walk"] = self

        def mtp(self, items):
            seen["hidden"] = torch.cat([self._hidden(slice(r, r + 1)) for r in range(ROWS)])
            yield from super().mtp(items)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "Walk", Watched)
        compress(prepared, folder, quick_search)
    return folder, prepared, seen["walk"], seen["hidden"]


def test_the_text_moves_through_what_a_reader_decodes(made):
    folder, prepared, _, hidden = made
    network = network_of(folder)
    expected = network.forward(rows_as_batch(prepared.calibration.token_ids), None)
    torch.testing.assert_close(hidden, expected, atol=2e-4, rtol=2e-4)
    # ... and not through the source's weights, which a mistake would leave there.
    source = network_of(NANO).forward(rows_as_batch(prepared.calibration.token_ids), None)
    assert (source - expected).abs().mean() > 0.02


def test_the_mtp_layer_sees_what_it_sees_when_it_drafts(made):
    folder, prepared, walk, hidden = made
    network, ids = network_of(folder), prepared.calibration.token_ids
    short = COLS - 1
    spans = tuple(Span(i * short, (i + 1) * short, 0, i, ()) for i in range(ROWS))
    batch = Batch(ids[:, :-1].flatten(), spans)
    before = hidden.view(ROWS, COLS, -1)[:, :-1].flatten(0, 1)
    expected = network.draft(before, ids[:, 1:].flatten(), batch, None)
    found = network.mtp.head_norm(walk.values.flatten(0, 1))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def recorded_inputs(network, token_ids, wanted):
    """Inputs of the products with the weights in `wanted` (name -> tensor), by name."""
    names = {id(tensor): name for name, tensor in wanted.items()}
    found = {}

    def linear(x, weight, bias=None):
        if id(weight) in names:
            found.setdefault(names[id(weight)], []).append(x.reshape(-1, x.shape[-1]))
        return torch.nn.functional.linear(x, weight, bias)

    network(replace(OpTable.reference(), linear=linear)).forward(rows_as_batch(token_ids), None)
    return {name: torch.cat(parts) for name, parts in found.items()}


def moments_up_to(prepared, layer):
    """Item -> Hessian of every matrix that is searched in the layers 0 .. `layer`."""
    found = {}

    class Watched(Encoder):
        def __call__(self, items, hessian, weights=MappingProxyType({})):
            for item in items:
                if item.target.format == "exl3":
                    found[item.name] = hessian(item)
            return super().__call__(items, hessian, weights)

    source = Source(prepared.checkpoint, prepared.config)
    encoder = Watched(source, quick_search, torch.device("cpu"), 1 << 30)
    walk = Walk(encoder, prepared.calibration.token_ids, prepared.plan.recipe.shrink_tokens)
    walk.begin()
    for unit, items in prepared.plan.groups().items():
        if unit.startswith("layer-") and int(unit[6:]) <= layer:
            list(walk.layer(int(unit[6:]), items))
    return found


def nano_inputs(prepared, name):
    """(parameters, inputs float64 of the product with `name` in the whole network of the source)"""
    assignment = assign(prepared.config, prepared.checkpoint.tensors)
    params = load_parameters(prepared.checkpoint, assignment, device="cpu", dtype=torch.float32)
    found = recorded_inputs(
        lambda ops: Network(prepared.config, params, ops),
        prepared.calibration.token_ids,
        {name: params[f"{name}.weight"]},
    )
    return params, found[name].double()


@pytest.mark.parametrize(
    "module",
    [
        "2.self_attn.o_proj",
        "2.self_attn.v_proj",
        "3.self_attn.q_b_proj",
        "3.self_attn.indexer.wq_b",
        "0.mlp.down_proj",
        "5.mlp.shared_experts.down_proj",
    ],
)
def test_moments_are_those_of_the_inputs_in_the_whole_network(module):
    # The only matrix that changes: everything before it is the source's.
    recipe = parse_recipe(
        f'[[rule]]\nmatch = "{LAYER}{module}"\nformat = "exl3"\nbits = 4\n', "one"
    )
    prepared = prepare(NANO, recipe, OPTIONS)
    hessians = moments_up_to(prepared, int(module[0]))
    name = f"{LAYER}{module}"
    _, inputs = nano_inputs(prepared, name)
    assert hessians.keys() == {name}
    found = hessians[name]
    assert found.num_rows == ROWS * COLS
    expected = inputs.T @ inputs / len(inputs)
    torch.testing.assert_close(found.matrix, expected, atol=1e-5, rtol=1e-4)


def test_every_token_goes_through_every_expert_for_the_moments():
    text = f'[[rule]]\nmatch = "{LAYER}3.mlp.experts.*.down_proj"\nformat = "exl3"\nbits = 2\n'
    prepared = prepare(NANO, parse_recipe(text, "downs"), OPTIONS)
    config = prepared.config.text
    seen = moments_up_to(prepared, 3)
    at = f"{LAYER}3.mlp."
    params, x = nano_inputs(prepared, f"{at}shared_experts.gate_proj")
    assert seen.keys() == {f"{at}experts.{e}.down_proj" for e in range(config.n_routed_experts)}
    for name, hessian in seen.items():
        gate, up = (params[name.replace("down", p) + ".weight"].double() for p in ("gate", "up"))
        g, u = x @ gate.T, x @ up.T
        g, u = g.clamp(max=config.swiglu_limit), u.clamp(-config.swiglu_limit, config.swiglu_limit)
        inner = torch.nn.functional.silu(g) * u
        assert hessian.num_rows == ROWS * COLS
        torch.testing.assert_close(
            hessian.matrix, inner.T @ inner / len(inner), atol=1e-5, rtol=1e-3
        )


def test_the_folder_is_whole_and_says_what_it_is(made):
    folder, prepared, _, _ = made
    assert verify_checksums(folder) > 0
    config = json.loads((folder / "config.json").read_text("utf-8"))
    assert config["quantization_config"]["quant_method"] == "exl3"
    assert config["quantization_config"]["calibration"] == {"rows": ROWS, "cols": COLS}
    assert (folder / "recipe.toml").read_text("utf-8") == SOME
    storage = json.loads((folder / "quantization_config.json").read_text("utf-8"))
    assert storage["tensor_storage"].keys() >= {f"{LAYER}3.mlp.experts.0.down_proj"}
    index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
    specs = {spec.name for item in prepared.plan.items for spec in item.outputs}
    assert index["weight_map"].keys() == specs
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (folder / name).read_bytes() == (NANO / name).read_bytes()


def test_groups_of_experts_do_not_change_the_result(made, tmp_path):
    folder, _, _, _ = made
    small = replace(OPTIONS, group_bytes=1)  # every matrix alone
    compress(prepare(NANO, parse_recipe(SOME, "some"), small), tmp_path / "some", quick_search)
    found, expected = (tensors_of(f) for f in (tmp_path / "some", folder))
    assert found == expected


def tensors_of(folder):
    checkpoint = open_checkpoint(folder)
    data = {}
    for name, info in checkpoint.tensors.items():
        buffer = bytearray(info.num_bytes)
        checkpoint.read_into(info, buffer)
        data[name] = bytes(buffer)
    return data


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_killed_at_twenty_moments_it_ends_in_the_same_bytes(made, tmp_path):
    folder, _, _, _ = made
    target = tmp_path / "some"
    r = random.Random(5)
    options = replace(OPTIONS, resume=True)
    whole = _seconds(lambda: _child(tmp_path / "first", options, None))
    kills = attempts = 0
    while kills < 20:
        attempts += 1
        assert attempts <= 100, "the moments fell after the end"
        code = _child(target, options, r.uniform(0.05, 1.0) * whole)
        assert code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
        if (target / "model.safetensors.index.json").exists():
            assert contents(target) == contents(folder)
            target = tmp_path / f"again-{len(list(tmp_path.iterdir()))}" / "some"
    if not (target / "model.safetensors.index.json").exists():
        with pytest.raises(CheckpointError):
            open_checkpoint(target)  # what is not complete is never loaded
        assert _child(target, options, None) == 0
    assert contents(target) == contents(folder)


def _seconds(run):
    start = time.monotonic()
    assert run() == 0
    return time.monotonic() - start


def _child(folder, options, kill_after):
    """Compress in a forked process; its exit code, or minus the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        try:
            compress(prepare(NANO, parse_recipe(SOME, "some"), options), folder, quick_search)
        except BaseException:
            os._exit(1)
        os._exit(0)
    end = None if kill_after is None else time.monotonic() + kill_after
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if end is not None and time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            end = None
        time.sleep(0.005)


def test_resuming_what_is_complete_compares_how_it_was_made(made):
    folder, prepared, _, _ = made
    before = contents(folder)
    compress(replace(prepared, options=replace(OPTIONS, resume=True)), folder, quick_search)
    other = prepare(NANO, parse_recipe(SOME, "some"), replace(OPTIONS, resume=True, seed=1))
    with pytest.raises(CheckpointError, match="is complete, and was made by another recipe"):
        compress(other, folder, quick_search)
    assert contents(folder) == before


def test_a_compressed_source_moves_and_an_fp8_source_is_searched(made, tmp_path):
    folder, _, _, _ = made
    recipe = (folder / "recipe.toml").read_text("utf-8")
    keep = '[[rule]]\nmatch = "**"\nformat = "keep"\n'  # its last rule wins: all only moves
    moved = tmp_path / "moved"
    compress(prepare(folder, parse_recipe(keep, "keep"), OPTIONS), moved, quick_search)
    assert tensors_of(moved) == tensors_of(folder)
    released, searched = tmp_path / "fp8", tmp_path / "searched"
    compress(prepare(NANO, load_recipe("fp8-block"), OPTIONS), released, quick_search)
    compress(prepare(released, parse_recipe(recipe, "some"), OPTIONS), searched, quick_search)
    ids = torch.arange(20, 50)[None]
    with torch.inference_mode():
        near, far, source = (network_of(f).full(ids) for f in (folder, searched, NANO))
    # FP8 adds its own small error to that of the trellis.
    assert (near - source).norm() * 0.7 < (far - source).norm() < (near - source).norm() * 1.4


def test_a_source_with_nan_is_refused_by_tensor(tmp_path):
    name = f"{LAYER}3.mlp.experts.4.down_proj.weight"
    source = tmp_path / "source"
    shutil.copytree(NANO, source)
    (source / DIGESTS_NAME).unlink()  # the NaN was there before them
    info = open_checkpoint(source).tensors[name]
    with info.file.open("r+b") as file:
        file.seek(info.start + 64)
        file.write(b"\xc0\x7f")  # a NaN in bfloat16
    prepared = prepare(source, parse_recipe(SOME, "some"), OPTIONS)
    with pytest.raises(LoadRefused, match=r"experts\.4\.down_proj\.weight: holds NaN"):
        compress(prepared, tmp_path / "out", quick_search)
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path / "out")


def damage_unit(folder, unit):
    path = next((folder / ".partial" / "units" / unit).iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def stop_after(unit):
    def listener(progress):
        if progress.unit == unit:
            raise KeyboardInterrupt

    return listener


def test_a_damaged_layer_in_the_middle_is_never_gone_on_from(tmp_path):
    prepared = prepare(NANO, parse_recipe(SOME, "some"), replace(OPTIONS, resume=True))
    with pytest.raises(KeyboardInterrupt):
        compress(prepared, tmp_path / "out", quick_search, stop_after("layer-004"))
    damage_unit(tmp_path / "out", "layer-001")
    with pytest.raises(CheckpointError, match="layer-001, from which later layers were made"):
        compress(prepared, tmp_path / "out", quick_search)


def test_a_damaged_last_layer_is_never_gone_on_from_with_its_own_text(tmp_path):
    prepared = prepare(NANO, parse_recipe(SOME, "some"), replace(OPTIONS, resume=True))
    with pytest.raises(KeyboardInterrupt):
        compress(prepared, tmp_path / "out", quick_search, stop_after("layer-003"))
    damage_unit(tmp_path / "out", "layer-002")
    with pytest.raises(CheckpointError, match="the calibration text after layer-001 is lost"):
        compress(prepared, tmp_path / "out", quick_search)


def test_a_damaged_end_of_the_stack_is_done_again(made, tmp_path):
    prepared = prepare(NANO, parse_recipe(SOME, "some"), replace(OPTIONS, resume=True))
    with pytest.raises(KeyboardInterrupt):
        compress(prepared, tmp_path / "some", quick_search, stop_after("head"))
    damage_unit(tmp_path / "some", "embedding")
    compress(prepared, tmp_path / "some", quick_search)
    assert contents(tmp_path / "some") == contents(made[0])


def test_a_crash_when_all_has_its_name_loses_nothing(made, tmp_path, monkeypatch):
    prepared = prepare(NANO, parse_recipe(SOME, "some"), replace(OPTIONS, resume=True))

    def crash(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "remove", crash)
        with pytest.raises(KeyboardInterrupt):
            compress(prepared, tmp_path / "some", quick_search)
    # The text that went with the layers is gone by now: it must not be asked for.
    compress(prepared, tmp_path / "some", quick_search)
    assert contents(tmp_path / "some") == contents(made[0])


def test_another_recipe_does_not_go_on_in_the_same_folder(tmp_path):
    prepared = prepare(NANO, load_recipe("nvfp4"), OPTIONS)
    with pytest.raises(ZeroDivisionError):
        compress(prepared, tmp_path / "out", quick_search, listener=lambda _: 1 // 0)
    other = prepare(NANO, load_recipe("fp8-block"), replace(OPTIONS, resume=True))
    with pytest.raises(CheckpointError, match="recipe: nvfp4 there, fp8-block asked for"):
        compress(other, tmp_path / "out", quick_search)


def test_without_a_trellis_no_text_is_needed(tmp_path):
    options = replace(OPTIONS, text=tmp_path / "absent.txt")
    prepared = prepare(NANO, load_recipe("nvfp4"), options)
    assert prepared.calibration is None
    with pytest.raises(SettingsError, match=r"absent\.txt"):
        prepare(NANO, load_recipe("base2"), options)


@pytest.mark.parametrize("name", ["nvfp4", "fp8-block"])
def test_rounded_models_load_and_answer_nearly_as_the_source(name, tmp_path):
    compress(prepare(NANO, load_recipe(name), OPTIONS), tmp_path / name, quick_search)
    prepared = prepare(NANO, parse_recipe(SOME, "some"), OPTIONS)
    ids = prepared.calibration.token_ids
    own, source = (network_of(f).full(ids) for f in (tmp_path / name, NANO))
    top = (own.argmax(-1) == source.argmax(-1)).float().mean()
    assert top > {"nvfp4": 0.75, "fp8-block": 0.9}[name]
    assert not torch.equal(own, source)
