"""Recipes as text: what is understood, what is refused and in which words; the ones we ship."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberbox.compress.recipe import (
    BITS,
    Budget,
    Rule,
    Target,
    load_recipe,
    parse_recipe,
    recipe_names,
)
from emberbox.errors import SettingsError

SHIPPED = (
    "base2",
    "base2-published",
    "base2.5",
    "base3",
    "base4",
    "fp8-block",
    "measured",
    "nvfp4",
)
LAYER = "model.language_model.layers."
RULE = '[[rule]]\nmatch = "lm_head"\nformat = "exl3"\n'


def problems(text):
    with pytest.raises(SettingsError) as caught:
        parse_recipe(text, "mine")
    first, *lines = caught.value.message.splitlines()
    assert first == f"recipe mine: {len(lines)} problem(s)"
    return [line.removeprefix("  - ") for line in lines]


def bits_of(recipe, module, part="trunk", attention="kda"):
    rules = [rule for rule in recipe.rules if rule.matches(module, part, attention)]
    return rules[-1].target.bits if rules else None


def test_everything_a_recipe_can_say():
    recipe = parse_recipe(
        """
        layout = "exllamav3"
        keep_fused_vision = true
        allow_mixed_experts = true
        budget_bytes = 96_000_000_000
        lowest_bits = 2

        [[rule]]
        match = "**.mlp.experts.**"
        format = "exl3"

        [[rule]]
        match = ["lm_head", "*"]
        part = "mtp"
        attention = "mla"
        format = "exl3"
        bits = 2.5
        codebook = "mul1"

        [[rule]]
        match = "a"
        format = "keep"

        [keep.layers]
        3 = [0, 2]
        """,
        "mine",
    )
    assert (recipe.layout, recipe.budget_bytes, recipe.lowest_bits) == (
        "exllamav3",
        96_000_000_000,
        2.0,
    )
    assert recipe.keep_fused_vision
    assert recipe.allow_mixed_experts
    assert recipe.keep.layers == {3: (0, 2)}
    assert recipe.rules == (
        Rule(
            ("**.mlp.experts.**",),
            Target("exl3", None, "mul1"),
            is_budgeted=True,
            where="rule 1 (line 8)",
        ),
        Rule(
            ("lm_head", "*"),
            Target("exl3", 2.5, "mul1"),
            part="mtp",
            attention="mla",
            where="rule 2 (line 12)",
        ),
        Rule(("a",), Target("keep"), where="rule 3 (line 20)"),
    )


def test_what_is_left_out_is_plain():
    recipe = parse_recipe(RULE + "bits = 4\n", "mine")
    assert (recipe.layout, recipe.keep_fused_vision, recipe.allow_mixed_experts) == (
        "released",
        False,
        False,
    )
    assert (recipe.budget_bytes, recipe.keep) == (None, None)
    assert recipe.rules[0].target == Target("exl3", 4.0, "mul1")
    assert recipe.text == RULE + "bits = 4\n"


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("lm_head", ["lm_head"], ["lm_head.x", "xlm_head", "LM_HEAD"]),
        ("a.*.c", ["a.b.c", "a..c"], ["a.b.b.c", "a.c"]),
        ("a.**.c", ["a.b.c", "a.b.b.c"], ["a.c", "a.b.c.d"]),
        ("**.o_proj", ["x.y.o_proj"], ["o_proj", "x.q_o_proj"]),
        ("[qkv]_proj", ["q_proj", "v_proj"], ["o_proj", "qk_proj", "[qkv]_proj"]),
        ("layers.[3-5].x", ["layers.3.x", "layers.5.x"], ["layers.6.x", "layers.33.x"]),
        ("[!q]_proj", ["o_proj"], ["q_proj"]),
        ("?.b", ["a.b"], ["..b", "ab.b"]),
        ("a+(b)$", ["a+(b)$"], ["aab", "a+b"]),
    ],
)
def test_a_pattern_is_a_name_with_wild_places(pattern, yes, no):
    rule = Rule((pattern,), Target("keep"))
    assert [name for name in yes + no if rule.matches(name, "trunk", "")] == yes


@given(st.lists(st.sampled_from(["a", "b", "cc"]), min_size=1, max_size=5), st.data())
def test_a_star_stands_for_one_piece_and_two_for_any_number(pieces, data):
    name = ".".join(pieces)
    place = data.draw(st.integers(0, len(pieces) - 1))
    starred = [*pieces[:place], "*", *pieces[place + 1 :]]
    assert Rule((".".join(starred),), Target("keep")).matches(name, "trunk", "")
    assert not Rule((".".join(starred),), Target("keep")).matches(name + ".x", "trunk", "")
    assert Rule((".".join([*pieces[:place], "**"]),), Target("keep")).matches(name, "trunk", "")


def test_part_and_attention_narrow_a_rule():
    rule = Rule(("**",), Target("keep"), part="mtp", attention="mla")
    assert rule.matches("x.y", "mtp", "mla")
    assert not rule.matches("x.y", "trunk", "mla")
    assert not rule.matches("x.y", "mtp", "kda")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "neither a [[rule]] nor a [keep]: nothing to do"),
        (
            "bugdet_bytes = 3\n" + RULE + "bits = 2",
            "'bugdet_bytes' (line 1) is unknown; did you mean 'budget_bytes'?",
        ),
        (
            RULE + "bit = 2\nbits = 2",
            "rule 1 (line 1): 'bit' (line 4) is unknown; did you mean 'bits'?",
        ),
        ("[zebra]\nx = 1\n" + RULE + "bits = 2", "'zebra' (line 1) is unknown"),
        (RULE, "rule 1 (line 1): exl3 without bits, and there is no budget (--budget-bytes)"),
        (
            RULE + "bits = 2.25",
            "rule 1 (line 1): bits is 2.25, expected one of 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8",
        ),
        (
            RULE + "bits = 4.5",
            "rule 1 (line 1): bits is 4.5, expected one of 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8",
        ),
        (
            RULE + "bits = true",
            "rule 1 (line 1): bits is True, expected one of 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8",
        ),
        (
            RULE + 'bits = 2.5\ncodebook = "mcg"',
            "rule 1 (line 1): 2.5 bits, a half rate, only with codebook mul1",
        ),
        (
            RULE + 'bits = 2\ncodebook = "mul2"',
            "rule 1 (line 1): codebook is 'mul2', expected one of 3inst, mcg, mul1; "
            "did you mean 'mul1'?",
        ),
        (
            '[[rule]]\nmatch = "a"\nformat = "nvfp4"\nbits = 4',
            "rule 1 (line 1): bits: only exl3 has that, this is nvfp4",
        ),
        (
            '[[rule]]\nmatch = "a"\nformat = "nvpf4"',
            "rule 1 (line 1): format is 'nvpf4', expected one of exl3, nvfp4, fp8_block, bf16, "
            "keep; did you mean 'nvfp4'?",
        ),
        (
            '[[rule]]\nmatch = "a"',
            "rule 1 (line 1): format is missing, expected exl3, nvfp4, fp8_block, bf16, keep",
        ),
        (
            '[[rule]]\nformat = "keep"',
            "rule 1 (line 1): match is None, expected a pattern or several",
        ),
        (
            '[[rule]]\nmatch = []\nformat = "keep"',
            "rule 1 (line 1): match is [], expected a pattern or several",
        ),
        (
            '[[rule]]\nmatch = "a[b"\nformat = "keep"',
            "rule 1 (line 1): match: 'a[b' is not a name with *, **, ?, [abc], [0-9] and [!abc]",
        ),
        (
            '[[rule]]\nmatch = "[9-0]"\nformat = "keep"',
            "rule 1 (line 1): match: '[9-0]' is not a name with *, **, ?, [abc], [0-9] and [!abc]",
        ),
        (
            '[[rule]]\nmatch = ""\nformat = "keep"',
            "rule 1 (line 1): match: '' is not a name with *, **, ?, [abc], [0-9] and [!abc]",
        ),
        ("rule = 3", "rule: expected tables, each under its own [[rule]]"),
        (
            "budget_bytes = 0\n" + RULE + "bits = 2",
            "budget_bytes is 0, expected a whole number from 1 to 1,125,899,906,842,623",
        ),
        (
            "budget_bytes = 5\n" + RULE + "bits = 2",
            "budget_bytes: no exl3 rule leaves its bits to the budget",
        ),
        (
            "lowest_bits = 2\n" + RULE + "bits = 2",
            "lowest_bits: without budget_bytes it says nothing",
        ),
        (
            "keep_fused_vision = true\n" + RULE + "bits = 2",
            'keep_fused_vision: only layout = "exllamav3" splits them',
        ),
        (
            "allow_mixed_experts = 1\n" + RULE + "bits = 2",
            "allow_mixed_experts is 1, expected true or false",
        ),
        (
            'layout = "exllamav2"\n' + RULE + "bits = 2",
            "layout is 'exllamav2', expected one of released, exllamav3; did you mean 'exllamav3'?",
        ),
        (
            "[keep]\n" + RULE + "bits = 2",
            "keep: expected one of file, layers, or by and count, and nothing else",
        ),
    ],
)
def test_a_mistake_is_named_with_its_place(text, said):
    assert said in problems(text)


def test_a_half_rate_to_start_a_budget_from_needs_mul1_too():
    text = "budget_bytes = 9\nlowest_bits = 1.5\n" + RULE + 'codebook = "mcg"'
    said = problems(text)
    assert said == ["rule 1 (line 3): 1.5 bits, a half rate, only with codebook mul1"]


def test_all_mistakes_come_at_once():
    said = problems("x = 1\n" + RULE + "bits = 9\n" + RULE + "bit = 2\nbits = 2")
    assert [line.partition(" is ")[0] for line in said] == [
        "'x' (line 1)",
        "rule 1 (line 2): bits",
        "rule 2 (line 6): 'bit' (line 9)",
    ]


@pytest.mark.parametrize("key", ["shrink_tokens", "budget_bytes"])
def test_a_text_for_a_number_is_refused_at_once(key):
    text = f'expert_moments = "routed"\n{key} = "256"\n' + RULE
    assert any(
        line.startswith(f"{key} is '256', expected a whole number") for line in problems(text)
    )


@pytest.mark.parametrize("value", ["[" * 5000, "{a=" * 2000, "9" * 5000], ids=["[", "{", "9"])
def test_toml_that_the_parser_gives_up_on_is_refused(value):
    with pytest.raises(SettingsError, match="recipe mine: not TOML: "):
        parse_recipe(f"layout = {value}", "mine")


def test_text_that_is_not_toml_says_where():
    with pytest.raises(SettingsError, match=r"recipe mine: not TOML: .*line 2"):
        parse_recipe("a = 1\nb = = 2", "mine")


def test_the_digest_changes_with_every_byte_of_recipe_and_map(tmp_path):
    texts = [RULE + "bits = 2\n", RULE + "bits = 3\n", RULE + "bits = 2 \n"]
    digests = {parse_recipe(text, "mine").digest for text in texts}
    text = RULE + 'bits = 2\n[keep]\nfile = "kept.json"\n'
    for kept in ('{"3": [0, 1]}', '{"3": [0, 2]}'):
        (tmp_path / "kept.json").write_text(kept)
        digests.add(parse_recipe(text, "mine", tmp_path).digest)
    assert len(digests) == 5
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)
    assert parse_recipe(texts[0], "other name").digest in digests


def test_a_file_is_read_and_its_name_kept(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(RULE + "bits = 2\n")
    recipe = load_recipe(path)
    assert (recipe.name, recipe.text) == (str(path), RULE + "bits = 2\n")
    assert load_recipe(str(path)) == recipe


@pytest.mark.parametrize(("name", "meant"), [("base22", "base2"), ("nvpf4", "nvfp4")])
def test_a_name_that_is_not_shipped_gives_the_list(name, meant):
    with pytest.raises(SettingsError) as caught:
        load_recipe(name)
    assert caught.value.message == (
        f"recipe: {name!r} is neither shipped nor a file; did you mean {meant!r}?"
    )
    assert caught.value.hint == f"shipped are {', '.join(SHIPPED)}"


def test_a_file_that_is_not_text_is_refused_by_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(SettingsError, match=re.escape(f"{path}: cannot be read:")):
        load_recipe(path)


def test_the_shipped_recipes_are_these():
    assert recipe_names() == SHIPPED
    for name in SHIPPED:
        recipe = load_recipe(name, Budget(10**9) if name == "measured" else None)
        assert recipe.name == name
        assert recipe.text.removeprefix("budget_bytes = 1000000000\n").startswith("# ")


def test_the_measured_recipe_asks_for_its_budget():
    with pytest.raises(SettingsError, match="there is no budget \\(--budget-bytes\\)"):
        load_recipe("measured")


# experts and eh_proj, attention and shared experts, dense layers, head, vision
@pytest.mark.parametrize(
    ("name", "rates"),
    [
        ("base2", (2, 4, 3, 6, 6)),
        ("base2.5", (2.5, 5, 3.5, 6, 6)),
        ("base3", (3, 5, 4, 6, 6)),
        ("base4", (4, 6, 5, 6, 6)),
        ("base2-published", (2, 4, 3, 5, 5)),
    ],
)
def test_the_base_recipes_give_more_where_every_token_passes(name, rates):
    recipe = load_recipe(name)
    experts, attention, dense, head, vision = rates
    for part, layer in (("trunk", 7), ("mtp", 45)):
        for leaf in ("gate_proj", "up_proj", "down_proj"):
            at = f"{LAYER}{layer}.mlp."
            assert bits_of(recipe, f"{at}experts.287.{leaf}", part, "mla") == experts
            assert bits_of(recipe, f"{at}shared_experts.{leaf}", part, "mla") == attention
        for leaf in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "indexer.wq_b"):
            assert bits_of(recipe, f"{LAYER}{layer}.self_attn.{leaf}", part, "mla") == attention
        for leaf in ("kv_b_proj", "indexer.wk", "indexer.weights_proj", "f_a_proj", "b_proj"):
            assert bits_of(recipe, f"{LAYER}{layer}.self_attn.{leaf}", part, "mla") is None
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert bits_of(recipe, f"{LAYER}0.self_attn.{leaf}") == attention
    for leaf in ("gate_proj", "up_proj", "down_proj"):
        assert bits_of(recipe, f"{LAYER}0.mlp.{leaf}") == dense
    assert bits_of(recipe, f"{LAYER}45.eh_proj", "mtp", "mla") == experts
    assert bits_of(recipe, "lm_head", "trunk", "") == head
    assert bits_of(recipe, "model.visual.blocks.0.mlp.gate_proj", "vision", "") == vision
    assert bits_of(recipe, "model.visual.merger.proj", "vision", "") == vision
    assert {rule.target.codebook for rule in recipe.rules} == {"mul1"}
    assert (recipe.layout, recipe.keep_fused_vision) == ("exllamav3", name == "base2-published")


def test_rates_are_those_of_the_format():
    assert BITS == (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)
