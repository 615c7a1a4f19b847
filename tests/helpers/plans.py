"""Plans of ember-nano and of layouts described in published.py, for the tests of compress."""

from pathlib import Path

import pytest

from emberbox.compress.conversion_plan import plan_conversion
from emberbox.compress.recipe import load_recipe, parse_recipe
from emberbox.errors import SettingsError
from emberbox.model.config import Glm5NextConfig
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.safetensors_header import TensorInfo
from tests.helpers.nano import NANO
from tests.helpers.published import num_bytes

CHECKPOINT = open_checkpoint(NANO)
CONFIG = Glm5NextConfig.from_dict(CHECKPOINT.config)
INFOS = CHECKPOINT.tensors
LAYER = "model.language_model.layers."
EXPERTS = '[[rule]]\nmatch = "**.mlp.experts.**"\n'


def plan_of(text, infos=INFOS, config=CONFIG):
    """`text`: a recipe, or the name of one we ship."""
    recipe = parse_recipe(text, "mine") if "\n" in text else load_recipe(text)
    return plan_conversion(config, infos, recipe)


def written(plan):
    specs = [spec for item in plan.items for spec in item.outputs]
    assert len({spec.name for spec in specs}) == len(specs) == plan.num_tensors
    return {(spec.name, spec.dtype, spec.shape) for spec in specs}


def layout_headers(made, marker="mul1"):
    return {header for entry in made for header in entry.headers(marker)}


def as_infos(headers):
    file = Path("memory", "model.safetensors")
    return {n: TensorInfo(n, d, s, file, 0, num_bytes(d, s)) for n, d, s in headers}


def reasons(text, infos=INFOS, config=CONFIG):
    with pytest.raises(SettingsError) as caught:
        plan_of(text, infos, config)
    first, *lines = caught.value.message.splitlines()
    assert first == f"recipe mine: {len(lines)} reason(s) why it does not fit this model"
    return [line.removeprefix("  - ") for line in lines]


def by_name(plan):
    return {item.name: item for item in plan.items}
