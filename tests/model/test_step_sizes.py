"""The predicate of sizes says what the kernels themselves check. Their launches are left out: with
tensors that have shapes and no memory, all that is in front of a launch runs without a GPU."""

import sys

import pytest
import torch

from emberbox.engine.decode_runner import DecodeRunner, Shape
from emberbox.errors import OpError
from emberbox.model.cache import CacheSize
from emberbox.model.config import Glm5NextConfig
from emberbox.model.network import Network
from emberbox.model.step_sizes import can_step, reads_pages
from emberbox.ops.launch import Program
from emberbox.ops.table import OpTable, bind_all
from emberbox.testing.synthetic import make_parameters, model_of
from emberbox.testing.synthetic_config import CONFIGS, FULL, TINY, config_json
from emberbox.testing.synthetic_values import Values
from tests.helpers.nano import nano_network

META = torch.device("meta")
KERNELS = bind_all(torch.device("cuda"), (9, 0))
CAN = (
    {},
    {"index_n_heads": 32},
    {"index_kpool": 8},
    {"index_kpool": 2, "index_topk": 30},
    {"q_lora_rank": 2048, "kv_lora_rank": 512},
    {"v_head_dim": 256},
    {"qk_head_dim": 512, "qk_nope_head_dim": 512},
)
CANNOT = (
    {"index_n_heads": 4},
    {"index_n_heads": 80},
    {"index_kpool": 16},
    {"q_lora_rank": 2176},
    {"kv_lora_rank": 640},
    {"v_head_dim": 96},
    {"num_attention_heads": 3, "num_key_value_heads": 3},
    {"qk_head_dim": 520, "qk_nope_head_dim": 520},
    {"qk_head_dim": 60, "qk_nope_head_dim": 60},
)


@pytest.fixture
def no_launches(monkeypatch):
    monkeypatch.setattr(Program, "launch", lambda *_args, **_options: None)
    monkeypatch.setattr(Program, "load", lambda *_names: None)
    for name, module in sys.modules.items():
        if name.startswith("emberbox.ops"):
            for asked, answer in (("num_multiprocessors", 132), ("arch_of", "sm_90")):
                if hasattr(module, asked):
                    monkeypatch.setattr(module, asked, lambda _device, answer=answer: answer)


def network_of(monkeypatch, change):
    made = config_json(TINY)
    made["text_config"] |= change
    monkeypatch.setitem(CONFIGS, "changed", lambda: made)
    model = model_of("changed")
    params = make_parameters(model.assignment, Values(META, 0), torch.bfloat16, KERNELS.ready)
    return Network(model.config, params, KERNELS)


def step(network):
    runner = DecodeRunner(
        network, network.new_cache(CacheSize(4, 2)), max_running=2, max_model_len=128
    )
    runner._compute(Shape(2, 2))


@pytest.mark.parametrize("change", CAN, ids=str)
def test_kernels_take_what_they_should(no_launches, monkeypatch, change):
    network = network_of(monkeypatch, change)
    assert can_step(network.config.text)
    step(network)


@pytest.mark.parametrize("change", CANNOT, ids=str)
def test_kernels_refuse_the_rest(no_launches, monkeypatch, change):
    network = network_of(monkeypatch, change)
    assert not can_step(network.config.text)
    assert not reads_pages(network.config.text, KERNELS)
    with pytest.raises(OpError):
        step(network)


def test_the_released_the_nano_and_the_tiny_network_have_steps_and_references_read_no_pages():
    made = [Glm5NextConfig.from_dict(config_json(name)) for name in (FULL, TINY)]
    configs = [*made, nano_network().config]
    for config in configs:
        assert can_step(config.text)
        assert reads_pages(config.text, KERNELS)
        assert not reads_pages(config.text, OpTable.reference())
