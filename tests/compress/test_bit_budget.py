"""Bytes become bits: whole groups, in the stated order, never beyond the budget."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from emberbox.compress.bit_budget import Group, choose_bits, group_of
from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.recipe import parse_recipe
from emberbox.errors import SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Part
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.nano import NANO

CHECKPOINT = open_checkpoint(NANO)
CONFIG = Glm5NextConfig.from_dict(CHECKPOINT.config)
L = "model.language_model.layers."
TEXT = """
layout = "exllamav3"
budget_bytes = {budget}
lowest_bits = {lowest}
[[rule]]
match = ["**.self_attn.[qkvo]_proj", "**.mlp.experts.**", "lm_head", "model.visual.**"]
format = "exl3"
[[rule]]
match = "**.mlp.shared_experts.*"
format = "exl3"
bits = 4
"""


def plan_of(budget, lowest=2):
    text = TEXT.format(budget=budget, lowest=lowest)
    return plan_conversion(CONFIG, CHECKPOINT.tensors, parse_recipe(text, "mine"))


@pytest.fixture(scope="module")
def smallest():
    with pytest.raises(SettingsError) as caught:
        plan_of(1)
    words = caught.value.message.split()
    assert words[:3] == ["budget_bytes:", "1", "is"]
    return int(words[words.index("with") - 1].strip(",").replace(",", ""))


def test_too_small_a_budget_says_what_can_be_reached(smallest):
    assert plan_of(smallest).num_bytes == smallest
    with pytest.raises(SettingsError) as caught:
        plan_of(smallest - 1)
    assert caught.value.message == (
        f"budget_bytes: {smallest - 1:,} is out of reach, the smallest that this recipe makes is "
        f"{smallest:,}, with 2 bits wherever the budget decides"
    )


@settings(max_examples=15)
@given(st.integers(0, 6_000_000))
def test_a_plan_stays_within_its_budget_and_groups_stay_whole(smallest, more):
    plan = plan_of(smallest + more)
    assert smallest <= plan.num_bytes <= smallest + more
    rates = {}
    for item in plan.items:
        if item.stored.format == "exl3" and "shared" not in item.name:
            rates.setdefault(group_of(item.name, item.part), set()).add(item.stored.bits)
    assert all(len(found) == 1 for found in rates.values())
    found = {bits for (bits,) in rates.values()}
    assert max(found) - min(found) <= 1
    assert {i.stored.bits for i in plan.items if ".shared_experts." in i.name} == {4.0}


def test_more_than_all_can_take_gives_eight_bits_to_all(smallest):
    plan = plan_of(10**12)
    bits = {i.stored.bits for i in plan.items if i.stored.format == "exl3"}
    assert bits == {4.0, 8.0}


@pytest.mark.parametrize(
    ("name", "part", "group"),
    [
        (f"{L}3.mlp.experts.7.gate_proj.weight", Part.TRUNK, (3, "mlp.experts.gate_up")),
        (f"{L}3.mlp.experts.0.up_proj.weight", Part.TRUNK, (3, "mlp.experts.gate_up")),
        (f"{L}3.mlp.experts.0.down_proj.weight", Part.TRUNK, (3, "mlp.experts.down_proj")),
        (f"{L}0.self_attn.k_proj.weight", Part.TRUNK, (0, "self_attn.qkv")),
        (f"{L}0.self_attn.qkv_proj.weight", Part.TRUNK, (0, "self_attn.qkv")),
        (f"{L}0.self_attn.o_proj.weight", Part.TRUNK, (0, "self_attn.o_proj")),
        (f"{L}8.mlp.experts.1.up_proj.weight", Part.MTP, (8, "mlp.experts.gate_up")),
        ("lm_head.weight", Part.TRUNK, (-1, "lm_head")),
        ("model.visual.blocks.2.attn.qkv.weight", Part.VISION, (-1, "vision")),
        ("model.visual.merger.proj.weight", Part.VISION, (-1, "vision")),
    ],
)
def test_a_group_is_a_kind_of_projection_in_a_layer(name, part, group):
    assert group_of(name, part) == Group(part, *group)


ORDER = [
    Group(Part.TRUNK, -1, "lm_head"),
    Group(Part.TRUNK, 9, "self_attn.o_proj"),
    Group(Part.TRUNK, 0, "mlp.down_proj"),
    Group(Part.TRUNK, 9, "mlp.experts.down_proj"),
    Group(Part.TRUNK, 3, "mlp.experts.down_proj"),
    Group(Part.TRUNK, 9, "mlp.experts.gate_up"),
    Group(Part.TRUNK, 3, "mlp.experts.gate_up"),
    Group(Part.VISION, -1, "vision"),
    Group(Part.MTP, 10, "mlp.experts.gate_up"),
]


def test_groups_are_raised_in_the_stated_order():
    weights = dict.fromkeys(reversed(ORDER), 80)  # 10 bytes for a bit
    for count in range(len(ORDER) + 1):
        bits = choose_bits(weights, 2.0, 500, 500 + 10 * count + 9)
        assert [group for group in ORDER if bits[group] == 3.0] == ORDER[:count]
        assert set(bits.values()) <= {2.0, 3.0}


def test_after_a_group_that_does_not_fit_smaller_ones_still_may_but_no_further_round():
    weights = {ORDER[0]: 80, ORDER[1]: 8000, ORDER[2]: 80}
    bits = choose_bits(weights, 2.0, 0, 999)
    assert [bits[group] for group in ORDER[:3]] == [3.0, 2.0, 3.0]


def test_from_a_half_rate_the_first_step_is_half_a_bit():
    weights = {ORDER[0]: 80, ORDER[1]: 80}
    bits = choose_bits(weights, 2.5, 0, 5 + 5 + 10)
    assert [bits[group] for group in ORDER[:2]] == [4.0, 3.0]
