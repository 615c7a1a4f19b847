"""The memory plan: exact for cache and snapshots, from above for the rest, refused when too big."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.engine.memory_plan import CacheBytes, plan_memory
from emberbox.engine.workspace import Workspace, vision_bytes
from emberbox.errors import EnvironmentProblem, MemoryRefused, SettingsError
from emberbox.model.batch import Batch, SequenceRows
from emberbox.model.cache import FP8, Cache, CacheSize
from emberbox.model.config import Glm5NextConfig
from emberbox.model.snapshots import SnapshotStore
from emberbox.ops.table import OpTable
from emberbox.settings import EngineSettings
from tests.helpers.nano import NANO, nano_cache, nano_network
from tests.helpers.released import released_config

GIB = 1024**3
TIGHT = 300 * 10**6
FULL = Glm5NextConfig.from_dict(released_config())
SMALL = Glm5NextConfig.from_dict(json.loads((NANO / "config.json").read_text("utf-8")))
NANO_WEIGHTS = 44 * 10**6


def nano_plan(available: int = 8 * GIB, **settings):
    return plan_memory(
        SMALL,
        weight_bytes=NANO_WEIGHTS,
        available_bytes=available,
        dtype=torch.float32,
        settings=EngineSettings(**settings),
        max_image_tokens=500,
    )


def full_plan(available: int = 120 * 10**9, weights: int = 90 * 10**9, **settings):
    return plan_memory(
        FULL,
        weight_bytes=weights,
        available_bytes=available,
        dtype=torch.bfloat16,
        settings=EngineSettings(**settings),
    )


def size_of(plan, name: str) -> int:
    (found,) = (line.num_bytes for line in plan.lines if line.name == name)
    return found


@pytest.mark.parametrize("config", [SMALL, FULL], ids=["nano", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("latent_dtype", [None, FP8], ids=str)
def test_cache_and_snapshots_take_what_the_plan_says(config, dtype, latent_dtype):
    sparse = sum(config.text.layer_is_sparse)
    cache = Cache(
        config.text,
        CacheSize(num_pages=7, num_slots=3),
        OpTable.reference(),
        layers=(config.text.num_hidden_layers - sparse, sparse),
        like=torch.empty(0, dtype=dtype, device="meta"),
        latent_dtype=latent_dtype,
    )
    sizes = CacheBytes.of(config.text, dtype.itemsize, latent_dtype)
    assert cache.num_bytes == 7 * sizes.page + 3 * sizes.slot
    assert SnapshotStore(cache, 5).num_bytes == 5 * sizes.snapshot


def test_what_is_allocated_with_a_plan_takes_what_its_lines_say():
    plan = nano_plan(GIB)
    cache = nano_cache(num_pages=plan.num_pages, num_slots=plan.num_slots)
    assert cache.num_bytes == size_of(plan, "cache pages") + size_of(plan, "state slots")
    store = SnapshotStore(cache, plan.num_snapshots)
    assert store.num_bytes == size_of(plan, "snapshots")


def test_sizes_of_the_released_model():
    sizes = CacheBytes.of(FULL.text, 2)
    assert sizes.page == 64 * 11_968  # bytes per token: 11 layers x (512 + 128 / 4) x 2
    assert sizes.slot == 147_800_064
    assert sizes.snapshot == 148_566_016  # 148 MB, 13 of them in 2 GB
    small = CacheBytes.of(FULL.text, 2, FP8)
    assert small.page == 64 * 6_512  # 11 layers x (512 + 4 x 4 of scales + 128 / 4 x 2)
    assert small.slot == sizes.slot
    assert CacheBytes.of(FULL.text, 2, torch.float16) == sizes


def test_an_fp8_cache_has_pages_of_its_size_and_is_allocated_so():
    plan = nano_plan(GIB, cache_dtype="fp8", max_model_len=640)
    assert plan.latent_dtype is FP8
    assert nano_plan().latent_dtype is None
    size = CacheSize(plan.num_pages, plan.num_slots)
    cache = nano_network().new_cache(size, plan.latent_dtype)
    assert cache.num_bytes == size_of(plan, "cache pages") + size_of(plan, "state slots")
    store = SnapshotStore(cache, plan.num_snapshots)
    assert store.num_bytes == size_of(plan, "snapshots") > 0


def test_fp8_needs_latents_of_whole_blocks():
    narrow = replace(SMALL, text=replace(SMALL.text, kv_lora_rank=192))
    sizes = {"weight_bytes": NANO_WEIGHTS, "available_bytes": 8 * GIB, "dtype": torch.float32}
    with pytest.raises(SettingsError, match=r"cache_dtype: fp8 .* 128 .* 192") as caught:
        plan_memory(narrow, settings=EngineSettings(cache_dtype="fp8"), **sizes)
    assert "auto" in caught.value.hint
    plan_memory(narrow, settings=EngineSettings(), **sizes)


def test_a_machine_with_room_gets_the_whole_context():
    plan = nano_plan()
    assert (plan.max_model_len, plan.num_slots, plan.num_snapshots) == (16384, 8, 64)
    assert plan.num_pages == 4 * 16384 // 64
    assert plan.prefill_tokens == 512
    assert plan.total == sum(line.num_bytes for line in plan.lines) < plan.available_bytes
    names = [line.name for line in plan.lines]
    assert names == [
        "weights",
        "cache pages",
        "state slots",
        "snapshots",
        "workspace",
        "vision",
        "reserve",
    ]
    assert (size_of(plan, "weights"), size_of(plan, "reserve")) == (NANO_WEIGHTS, 8 * GIB // 10)
    assert size_of(nano_plan(64 * GIB), "reserve") == GIB
    with pytest.raises(FrozenInstanceError):
        plan.num_pages = 3


def test_a_plan_follows_its_settings():
    plan = nano_plan(
        max_model_len=1000, max_running=3, cache_tokens=1990, snapshot_bytes=10**7, prefill_tokens=9
    )
    assert (plan.max_model_len, plan.num_slots, plan.prefill_tokens) == (1000, 3, 9)
    assert plan.num_pages == 32  # 1990 tokens, whole pages
    assert plan.num_snapshots == 10**7 // CacheBytes.of(SMALL.text, 4).snapshot == 10
    assert nano_plan(snapshot_bytes=0).num_snapshots == 0


def test_the_cache_holds_no_more_than_the_requests_could_use():
    assert nano_plan(max_running=1).num_pages == 16384 // 64
    assert nano_plan(max_running=3).num_pages == 3 * 16384 // 64
    assert nano_plan(max_running=1, max_model_len=100).num_pages == 7  # 4 x 100 tokens


def test_without_room_the_context_is_the_largest_multiple_of_64_that_fits():
    plan = nano_plan(TIGHT)
    assert plan.max_model_len % 64 == 0
    assert 64 <= plan.max_model_len < 16384
    assert plan.total <= TIGHT
    assert "the model holds 16,384" in plan.table()
    snapshots = size_of(plan, "snapshots")
    nano_plan(TIGHT, max_model_len=plan.max_model_len, snapshot_bytes=snapshots)
    with pytest.raises(MemoryRefused):
        nano_plan(TIGHT, max_model_len=plan.max_model_len + 64, snapshot_bytes=snapshots)
    assert nano_plan(cache_tokens=6400).max_model_len == 6400


def test_a_context_that_is_given_costs_snapshots_before_it_is_refused():
    most = nano_plan(TIGHT, snapshot_bytes=0).max_model_len
    tight = nano_plan(TIGHT, max_model_len=most)
    assert tight.max_model_len == most
    assert tight.num_snapshots < nano_plan(TIGHT).num_snapshots
    assert tight.num_pages == -(-most // 64)


def test_the_full_model_on_a_box_of_120_gb():
    plan = full_plan(max_model_len=131072)
    assert (plan.num_snapshots, plan.num_slots) == (13, 8)
    assert size_of(plan, "snapshots") == 13 * 148_566_016
    assert size_of(plan, "state slots") == 8 * 147_800_064
    assert size_of(plan, "cache pages") == plan.num_pages * 64 * 11_968
    assert plan.num_pages * 64 == 4 * 131072
    assert full_plan().max_model_len < 1048576


def test_snapshots_take_a_quarter_of_what_is_left_on_a_tight_machine():
    plan = full_plan(97_500_000_000, max_model_len=4096)
    fixed = ("weights", "state slots", "reserve")
    left = 97_500_000_000 - sum(size_of(plan, name) for name in fixed)
    assert plan.num_snapshots == left // 4 // 148_566_016 == 8


def test_a_refusal_names_every_number_and_what_to_lower():
    with pytest.raises(MemoryRefused) as caught:
        full_plan(max_model_len=1048576)
    assert isinstance(caught.value, EnvironmentProblem)
    for text in (
        "120,000,000,000",
        "90,000,000,000",
        "1,048,576 tokens of 11,968",
        "8 of 147,800,064",
    ):
        assert text in caught.value.message
    for name in ("weights", "cache pages", "state slots", "snapshots", "workspace", "vision"):
        assert f"\n{name} " in caught.value.message
    assert caught.value.hint.startswith("lower max_model_len to ")


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"max_model_len": 1048576}, "max_model_len"),
        ({"max_model_len": 1048576}, "prefill_tokens"),
        ({"max_running": 500}, "max_running"),
        ({"max_model_len": 4096, "cache_tokens": 10**8}, "cache_tokens"),
        ({"snapshot_bytes": 10**11}, "snapshot_bytes"),
    ],
    ids=str,
)
def test_the_advice_is_the_largest_value_that_fits(settings, name):
    with pytest.raises(MemoryRefused) as caught:
        full_plan(**settings)
    advised = dict(
        part.split(" to ") for part in caught.value.hint.removeprefix("lower ").split(", or ")
    )
    value = int(advised[name])
    full_plan(**(settings | {name: value}))
    with pytest.raises(MemoryRefused):
        step = 64 if name != "snapshot_bytes" else 148_566_016
        full_plan(**(settings | {name: value + (1 if name == "max_running" else step)}))


def test_when_no_setting_is_enough_the_advice_says_so():
    with pytest.raises(MemoryRefused, match="no setting is enough: at the smallest") as caught:
        full_plan(weights=119 * 10**9)
    missing = int(caught.value.hint.split(" of all ")[1].split(" bytes")[0].replace(",", ""))
    smallest = {"max_model_len": 64, "max_running": 1, "prefill_tokens": 64, "snapshot_bytes": 0}
    # A tenth of what comes on top goes nowhere: the reserve is a whole GiB already.
    full_plan(weights=119 * 10**9, available=120 * 10**9 + missing, **smallest)
    with pytest.raises(MemoryRefused):
        full_plan(weights=119 * 10**9, available=120 * 10**9 + missing - 1, **smallest)


def test_when_only_all_settings_together_are_enough_the_advice_is_that():
    wide = {"max_model_len": 1048576, "max_running": 195, "prefill_tokens": 4096}
    with pytest.raises(MemoryRefused, match="no setting is enough alone") as caught:
        full_plan(**wide)
    length = int(caught.value.hint.split("max_model_len ")[1].split(",")[0])
    full_plan(max_model_len=length, max_running=1, prefill_tokens=64)


def test_a_context_beyond_the_models_is_a_wrong_setting():
    with pytest.raises(SettingsError, match="16385 is beyond") as caught:
        nano_plan(max_model_len=16385)
    assert "1..16384" in caught.value.hint


def test_a_model_without_a_vision_tower_plans_none():
    text_only = replace(SMALL, vision=None)
    assert vision_bytes(text_only.vision, 4, 8000) == 0
    assert vision_bytes(SMALL.vision, 4, 2000) < vision_bytes(SMALL.vision, 4, 8000) // 3


@given(
    available=st.integers(10**8, 40 * 10**9),
    length=st.none() | st.integers(1, 16384),
    running=st.integers(1, 64),
    extra=st.none() | st.integers(0, 10**6),
    snapshots=st.none() | st.integers(0, 10**9),
)
def test_a_plan_that_is_made_fits_and_serves_one_full_request(
    available, length, running, extra, snapshots
):
    cache = None if extra is None else extra + (length or 1)
    settings = {"max_model_len": length, "max_running": running, "cache_tokens": cache}
    try:
        plan = nano_plan(available, **settings, snapshot_bytes=snapshots)
    except MemoryRefused:
        return
    assert plan.total <= available
    assert plan.num_pages * 64 >= plan.max_model_len
    assert plan.num_snapshots >= 0
    assert length in (None, plan.max_model_len)
    if snapshots is not None:
        one = CacheBytes.of(SMALL.text, 4).snapshot
        assert plan.num_snapshots == snapshots // one


def peak_bytes(work) -> int:
    """The most that tensors took beyond what there was before, counted by torch's allocator."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        work()
    now = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


@pytest.mark.parametrize(("length", "prefill"), [(640, 512), (4096, 512), (4096, 2304)])
@torch.inference_mode()
def test_the_largest_step_takes_at_most_what_the_workspace_line_says(length, prefill):
    network, num_pages = nano_network(), length // 64
    cache = nano_cache(num_pages=num_pages + 8, num_slots=9)
    for tensor in (cache.latents, cache.pooled, cache.state, cache.ring_keys, cache.ring_gates):
        tensor.normal_()
    rows = [SequenceRows([300] * prefill, length - prefill, 0, tuple(range(num_pages)))]
    rows += [SequenceRows([301] * 8, 0, i + 1, (num_pages + i,), 7) for i in range(8)]
    batch = Batch.of(rows, torch.device("cpu"))
    measured = peak_bytes(lambda: network.logits(network.forward(batch, cache)[-65:]))
    settings = EngineSettings(prefill_tokens=prefill)
    estimate = Workspace.of(SMALL.text, 4, settings, length).num_bytes
    assert measured <= estimate <= 3 * measured


@torch.inference_mode()
def test_a_picture_takes_at_most_what_the_vision_line_says():
    tower = nano_network().vision

    def look():
        tower(torch.randn(40 * 40, 3 * 2 * 14 * 14), [(1, 40, 40)])

    measured = peak_bytes(look)
    assert measured <= vision_bytes(SMALL.vision, 4, 400) <= 3 * measured
