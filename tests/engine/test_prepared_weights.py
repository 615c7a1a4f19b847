"""A compressed checkpoint on a GPU: weights prepared at load, and the network they make.

ember-nano in `base2`: EXL3 in every layer. Without a GPU the load alone is seen, through the op
table of one.
"""

import pytest
import torch

from emberbox.engine import loading
from emberbox.engine.decode_once import prepare_once
from emberbox.engine.llm import LLM
from emberbox.engine.loading import load
from emberbox.engine.request import SamplingParams
from emberbox.formats.base import QuantTensor
from emberbox.measure.lanes import load_plain
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.weights import assign, load_parameters
from emberbox.ops.moe_experts.bank import ExpertBank
from emberbox.ops.numerics import relative_error
from emberbox.ops.prepared import PREPARED
from emberbox.ops.table import bind_all
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.gpu import gpu_or_skip
from tests.helpers.nano import NANO

BASE2 = NANO.with_name("ember-nano-base2")
TABLE = bind_all(torch.device("cuda"), (12, 1))
SMALL = {"max_model_len": 256, "cache_tokens": 256, "snapshot_bytes": 0, "max_running": 1}
# Rounding rotated activations to float16 in every product moves the logits by 2e-4 of their norm
# on random tokens and 1.3e-3 on text (the plain twin); bfloat16 by 1.2e-2 whatever the weights are.
TOLERANCE = {"float32": 4e-3, "bfloat16": 4e-2}
QUESTIONS = ("Count from 3 to 9.", "Count down from 12 to 4.", "Say hello.")


def stored_parameters():
    checkpoint = open_checkpoint(BASE2)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)
    return config, assignment, params


def test_weights_are_prepared_once_and_the_stored_form_is_dropped():
    config, assignment, params = stored_parameters()
    stored = dict(params)
    ready = prepare_once(params, TABLE)
    assert ready is params
    formats = {name: v.format for name, v in ready.items() if isinstance(v, QuantTensor)}
    assert set(formats.values()) == {PREPARED}
    assert len(formats) == sum(isinstance(v, QuantTensor) for v in stored.values()) > 100
    held = [
        sum(v.num_bytes for v in p.values() if isinstance(v, QuantTensor)) for p in (stored, ready)
    ]
    assert held[0] == held[1]
    assert assignment.loaded_bytes(4, decoded=True, kept={"exl3"}) == assignment.loaded_bytes(4)
    assert assignment.loaded_bytes(4, decoded=True) > 2 * assignment.loaded_bytes(4)
    name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
    assert torch.equal(ready[name].decode(), stored[name].decode())
    network = Network(config, ready, TABLE)
    assert network.layers[0].mlp.gate.apply is TABLE.linear_exl3
    moe = network.layers[1].mlp
    assert isinstance(moe.experts, ExpertBank)
    assert moe.experts[3][1] is ready[name]


def test_a_cpu_has_nothing_to_prepare():
    table = bind_all(torch.device("cpu"))
    _, _, params = stored_parameters()
    before = dict(params)
    assert all(prepare_once(params, table)[name] is value for name, value in before.items())


def test_the_plan_says_that_weights_are_prepared_and_counts_what_kernels_keep(monkeypatch):
    settings = EngineSettings(device="cpu", dtype="float32", **SMALL)
    decoded = load(BASE2, settings).memory
    monkeypatch.setattr(loading, "bind_all", lambda *_: TABLE)
    loaded = load(BASE2, settings)
    plan = loaded.memory
    assert plan.lines[0].note == "as they are stored (prepared)"
    _, assignment, _ = stored_parameters()
    assert plan.lines[0].num_bytes == assignment.loaded_bytes(4) < decoded.lines[0].num_bytes / 2
    lines = [{line.name: line for line in p.lines}["workspace"] for p in (decoded, plan)]
    rows = 512 + 8
    slots = 4 * rows
    sorted_rows = slots + 16 * 7
    kept = rows * 512 * 2 + sorted_rows * (4 * 128 + 2 * 128)
    kept += max(8 * sorted_rows * 128, 4 * slots * 128)
    assert lines[1].num_bytes - lines[0].num_bytes == kept
    assert lines[1].note == lines[0].note + f", and {kept:,} that kernels keep"
    assert isinstance(loaded.network.layers[1].mlp.experts, ExpertBank)


# -- on a GPU ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference():
    """The network in float32 on the CPU, every op its plain reference, weights decoded."""
    return load_plain(BASE2, "cpu")


def token_ids(kind):
    if kind == "random":
        return torch.randint(0, 4000, (2, 97), generator=torch.Generator().manual_seed(0))
    text = (NANO.parents[1] / "README.md").read_text(encoding="utf-8")
    llm = LLM(NANO, EngineSettings(device="cpu", dtype="float32", **SMALL))
    return torch.tensor([llm.prepare(text).token_ids[:500]])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["random", "text"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_logits_are_those_of_the_reference_on_the_cpu(reference, dtype, kind):
    gpu_or_skip()
    network = load(BASE2, EngineSettings(device="cuda", dtype=dtype, **SMALL)).network
    assert network.ops.names["linear_exl3"] == network.ops.names["moe_experts"] == "cuda"
    assert isinstance(network.layers[1].mlp.experts, ExpertBank)
    tokens = token_ids(kind)
    with torch.inference_mode():
        expected = reference.full(tokens)
        found = network.full(tokens.cuda()).cpu()
    assert relative_error(found, expected) <= TOLERANCE[dtype]
    same = (found.argmax(-1) == expected.argmax(-1)).double().mean()
    assert float(same) >= {"float32": 0.995, "bfloat16": 0.95}[dtype]


@pytest.mark.gpu
def test_replies_on_a_gpu_are_those_on_a_cpu():
    gpu_or_skip()
    texts = []
    for device in ("cpu", "cuda"):
        settings = EngineSettings(device=device, dtype="float32", max_model_len=512, max_running=3)
        llm = LLM(BASE2, settings)
        prompts = [llm.prepare_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        params = SamplingParams(max_tokens=48, temperature=0.0)
        together = [done.text for done in llm.complete_all(prompts, params)]
        assert together == [llm.complete(prompt, params).text for prompt in prompts]
        texts.append(together)
    assert texts[0] == texts[1]
    assert "3, 4, 5, 6, 7, 8, 9" in texts[0][0]
