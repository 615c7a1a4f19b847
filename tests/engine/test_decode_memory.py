"""What decode steps hold on a GPU, as the plan counts it before there is a network."""

from dataclasses import replace

import pytest
import torch

from emberbox.engine.decode_memory import buffer_bytes, graph_bytes
from emberbox.engine.decode_runner import DecodeRunner
from emberbox.engine.loading import has_graphs
from emberbox.engine.memory_plan import plan_memory
from emberbox.engine.workspace import Kernels, Workspace
from emberbox.model.config import Glm5NextConfig
from emberbox.model.decode_step import DecodeStep
from emberbox.model.parameters import Part
from emberbox.model.step_sizes import can_step
from emberbox.model.weights import assign
from emberbox.ops.table import OpTable
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.nano import NANO, nano_cache, nano_network
from tests.helpers.released import released_config

BASE2 = NANO.with_name("ember-nano-base2")
FULL = Glm5NextConfig.from_dict(released_config())
PUBLISHED_BYTES = 85_130_000_000  # of the full model in base2-published, MTP layer and tower too
BAR_BYTES = 92 * 10**9


def full_plan(**changes):
    """One request of 262,144 tokens on one large GPU, chunks of 4,096 tokens, no snapshots."""
    settings = EngineSettings(
        max_model_len=262_144, max_running=1, prefill_tokens=4096, snapshot_bytes=0
    )
    return plan_memory(
        FULL,
        weight_bytes=PUBLISHED_BYTES,
        available_bytes=140 * 10**9,
        dtype=torch.bfloat16,
        settings=replace(settings, cache_tokens=262_144, **changes),
        is_prepared=True,
        has_graphs=True,
    )


def sizes_of(plan):
    return {line.name: line.num_bytes for line in plan.lines}


@pytest.mark.parametrize(("max_running", "max_model_len"), [(1, 64), (3, 1000), (32, 257)])
def test_buffers_are_those_of_the_runner(max_running, max_model_len):
    network, cache = nano_network(), nano_cache(num_pages=2, num_slots=2)
    runner = DecodeRunner(network, cache, max_running=max_running, max_model_len=max_model_len)
    drafts, inputs = runner.step.drafts, runner._inputs
    held = [drafts.conv, drafts.k, drafts.gate, drafts.deltas, runner._logits, runner._chosen]
    held += [inputs.device, inputs.host, inputs._accepted]
    text = network.config.text
    expected = sum(t.numel() * t.element_size() for t in held)
    assert buffer_bytes(text, 4, max_running, max_model_len) == expected


def test_the_plan_knows_when_steps_are_graphs_as_the_network_does():
    network = nano_network()
    text = network.config.text
    assert can_step(text) and DecodeStep.can(network)
    assert can_step(FULL.text)
    changes = ({"kda_head_dim": 64}, {"index_head_dim": 64}, {"hc_mult": 2}, {"conv_width": 3})
    assert not any(can_step(replace(text, **change)) for change in changes)


def test_graphs_need_a_gpu_with_kernels_and_plain_small_weights():
    checkpoint = open_checkpoint(BASE2)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    plain = OpTable.reference()
    ops = replace(plain, names={**plain.names, "mla_decode": "cuda", "index_choose": "cuda"})
    cuda, kept = torch.device("cuda"), frozenset({"exl3"})
    assert has_graphs(cuda, ops, config, assignment, kept)
    assert not has_graphs(torch.device("cpu"), ops, config, assignment, kept)
    assert not has_graphs(cuda, plain, config, assignment, kept)
    for name in ("self_attn.b_proj.weight", "self_attn.indexer.wk.weight"):
        changed = quantised(assignment, name, Part.TRUNK)
        assert not has_graphs(cuda, ops, config, changed, kept)
        assert has_graphs(cuda, ops, config, changed, frozenset())  # is decoded
    assert has_graphs(cuda, ops, config, quantised(assignment, "indexer.wk.weight", Part.MTP), kept)


def quantised(assignment, name, part):
    """The same, as if the weights called so were stored in EXL3."""
    form = next(p.format for q in assignment.placements for p in q.pieces if p.is_quantised)
    placements = tuple(
        replace(placement, pieces=tuple(replace(p, format=form) for p in placement.pieces))
        if placement.target.name.endswith(name) and placement.part is part
        else placement
        for placement in assignment.placements
    )
    assert placements != assignment.placements
    return replace(assignment, placements=placements)


def test_the_full_model_with_a_quarter_of_its_context_is_planned_below_the_bar():
    plan = full_plan()
    sizes = sizes_of(plan)
    assert list(sizes)[4:] == [
        "workspace",
        "vision",
        "decode steps",
        "CUDA context and graphs",
        "reserve",
    ]
    assert sizes["cache pages"] == 262_144 * 11_968
    assert sizes["decode steps"] == buffer_bytes(FULL.text, 2, 1, 262_144)
    assert sizes["CUDA context and graphs"] == graph_bytes(FULL.text, 2, 1)
    assert plan.peak_bytes == plan.total - sizes["reserve"] <= BAR_BYTES
    assert sizes["workspace"] < 2_200_000_000
    fp8 = sizes_of(full_plan(cache_dtype="fp8"))
    assert fp8["cache pages"] == 262_144 * 6_512
    assert {name for name in sizes if sizes[name] != fp8[name]} == {"cache pages"}


def test_each_request_has_its_tables_of_the_vocabulary():
    text = FULL.text
    wider = replace(text, vocab_size=text.vocab_size + 1000)
    grown = [graph_bytes(wider, 2, n) - graph_bytes(text, 2, n) for n in (5, 8)]  # of one shape
    assert grown[1] - grown[0] == 1000 * 18 * 3
    assert grown[0] == 1000 * (32 * (2 + 2 * 4) + 40 + 18 * 5)


def test_more_rows_and_shapes_take_more():
    text = FULL.text
    assert graph_bytes(text, 2, 8) - graph_bytes(text, 2, 1) > 24 * text.vocab_size * 10
    settings = EngineSettings(prefill_tokens=4096, max_running=1)
    works = [
        Workspace.of(text, 2, settings, 262_144, Kernels(products, graphs))
        for products, graphs in ((False, False), (True, False), (False, True), (True, True))
    ]
    assert works[0].kept == 0
    assert works[3].kept == works[1].kept + works[2].kept
    # Pages are read where they lie: no term grows with the context but scores, which are bounded.
    longer = Workspace.of(text, 2, settings, 1_048_576, Kernels(products=True, graphs=True))
    assert longer == works[3]
    assert works[1].num_bytes > 20 * works[3].num_bytes
