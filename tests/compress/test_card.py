"""The model card: what hubs parse, what a reader sees, and nothing that was not given."""

import dataclasses

import pytest
import yaml

from emberbox.compress.card import CalibrationFacts, CardFacts, PartFacts, model_card

RECIPE = '[[rule]]\npattern = "*"\nformat = "exl3"\n'

FACTS = CardFacts(
    name="ember-nano-base2",
    base_model="ember/ember-nano",
    license="apache-2.0",
    tags=("glm5_next", "exl3"),
    parts=(
        PartFacts(
            part="routed experts",
            format="EXL3 mul1",
            bits=2.0123,
            num_weights=1_000_000,
            num_bytes=251_538,
            mean_error=0.0312,
            worst_error=0.0457,
            worst_matrix="layers.3.mlp.experts.7.down_proj",
        ),
        PartFacts(part="norms", format="BF16", bits=16.0, num_weights=512, num_bytes=1024),
    ),
    average_bits=2.0194,
    num_bytes=252_562,
    calibration=CalibrationFacts(source="the text that ships", num_rows=250, num_tokens=512_000),
    recipe_name="base2",
    recipe_text=RECIPE,
    version="0.1.0",
    device="cuda",
)
BARE = dataclasses.replace(
    FACTS,
    base_model=None,
    license=None,
    tags=(),
    calibration=None,
    parts=FACTS.parts[1:],
    device=None,
)


def _front_matter(text):
    before, matter, body = text.split("---\n", 2)
    assert before == ""
    return yaml.safe_load(matter), body


def test_front_matter_is_what_hubs_read():
    matter, _ = _front_matter(model_card(FACTS))
    assert matter == {
        "base_model": "ember/ember-nano",
        "base_model_relation": "quantized",
        "license": "apache-2.0",
        "library_name": "emberbox",
        "tags": ["glm5_next", "exl3"],
    }


def test_the_body_holds_every_fact():
    _, body = _front_matter(model_card(FACTS))
    lines = body.splitlines()
    assert (
        "| routed experts | EXL3 mul1 | 2.012 | 1,000,000 | 251,538 | 3.12e-02 | 4.57e-02 |"
        in lines
    )
    assert "| norms | BF16 | 16.000 | 512 | 1,024 | – | – |" in lines
    assert "- routed experts: `layers.3.mlp.experts.7.down_proj` (4.57e-02)" in lines
    assert "250 rows, 512,000 tokens. Source: the text that ships." in lines
    assert "emberbox serve ember-nano-base2" in lines
    assert "emberbox compress SRC ember-nano-base2 --recipe recipe.toml" in lines
    assert RECIPE in body
    assert "Computed with `--device` `cuda`." in body
    assert "`ember/ember-nano`" in body
    assert "emberbox 0.1.0: 2.019 bits per weight on average, 0.3 MB (252,562 bytes)" in body


def test_what_is_not_known_is_not_said():
    matter, body = _front_matter(model_card(BARE))
    assert matter == {"library_name": "emberbox"}
    for word in ("Calibration", "tr(E", "worst error", "None", "Compressed weights of", "--device"):
        assert word not in body


def test_the_same_facts_give_the_same_text():
    assert model_card(FACTS) == model_card(dataclasses.replace(FACTS))


@pytest.mark.parametrize(
    "text",
    [
        "yes",
        "a: b # c",
        "- x",
        'quo"te',
        "back\\slash",
        "line\nbreak",
        "\u2028\x85\ufeff",
        "Flüß 中 😀",
    ],
    ids=ascii,
)
def test_any_text_survives_the_front_matter(text):
    facts = dataclasses.replace(FACTS, base_model=text, license=text, tags=(text, text))
    matter, _ = _front_matter(model_card(facts))
    assert matter["base_model"] == matter["license"] == text
    assert matter["tags"] == [text, text]


def test_text_cannot_break_the_table_or_the_recipe_out_of_its_fence():
    part = dataclasses.replace(FACTS.parts[0], part="a|b\n| c", worst_matrix="x`y|z")
    facts = dataclasses.replace(FACTS, parts=(part,), recipe_text="````\n# out?\n", name="a b; rm")
    body = model_card(facts)
    table = [line for line in body.splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert len({line.replace("\\|", "").count("|") for line in table}) == 1
    assert "`````toml\n````\n# out?\n`````" in body
    assert "emberbox serve FOLDER" in body
