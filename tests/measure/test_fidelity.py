"""Measuring in both lanes: exact against itself, right against plain formulas, cold."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from emberbox.engine.llm import LLM
from emberbox.errors import MemoryRefused, SettingsError
from emberbox.formats import fp8_block
from emberbox.measure import fidelity as fidelities
from emberbox.measure import lanes
from emberbox.measure.fidelity import FidelityOptions, compare_networks, measure_fidelity
from emberbox.measure.lanes import LANES, Lane, load_plain, plain_network
from emberbox.measure.metrics import Positions
from emberbox.model.config import Glm5NextConfig
from emberbox.model.weights import assign, load_parameters
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from tests.helpers.nano import NANO
from tests.helpers.tiny import tiny_config, write_folder
from tests.measure.tiny_pair import LENGTHS, pair_tensors, tiny_panel, write_pair

BASE2 = NANO.with_name("ember-nano-base2")
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def panel(tmp_path):
    return tiny_panel(tmp_path)


def options(lane="weights", **more) -> FidelityOptions:
    return FidelityOptions(lane=lane, device="cpu", **{"chunk": 64, **more})


def every(found, run=0) -> Positions:
    return Positions.join([positions for _, positions in found.runs[run]])


def log_probabilities(logits: torch.Tensor) -> np.ndarray:
    return torch.log_softmax(logits.double(), -1).numpy()


def is_zero(positions: Positions) -> bool:
    exact = not positions.kl.any() and not positions.reverse_kl.any()
    return exact and positions.top1.all() and (positions.top5 == 5).all()


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("whose", [0, 1], ids=["reference", "candidate"])
def test_a_model_is_exactly_itself(pair, panel, lane, whose):
    found = measure_fidelity(pair[whose], pair[whose], panel, options(lane))
    assert is_zero(every(found))
    assert (every(found).reference_nll == every(found).candidate_nll).all()
    assert len(every(found)) == panel.num_positions == sum(LENGTHS) - len(LENGTHS)


def test_a_model_of_quantised_weights_is_exactly_itself_when_served(tmp_path):
    panel = tiny_panel(tmp_path, lengths=(70,))
    assert is_zero(every(measure_fidelity(BASE2, BASE2, panel, options("served", runs=1))))


def test_the_lane_weights_is_the_plain_network(pair, panel):
    found = measure_fidelity(*pair, panel, options("weights"))
    networks = [load_plain(folder, "cpu") for folder in pair]
    for window, (name, positions) in zip(panel.windows, found.runs[0], strict=True):
        ids = torch.tensor([window.token_ids])
        with torch.inference_mode():
            p, q = (log_probabilities(network.full(ids)[0, :-1]) for network in networks)
        targets = np.array(window.token_ids[1:])
        rows = np.arange(len(targets))
        assert name == window.id
        assert positions.kl == pytest.approx((np.exp(p) * (p - q)).sum(1), abs=1e-5, rel=1e-5)
        assert positions.reference_nll == pytest.approx(-p[rows, targets], abs=1e-5)
        assert positions.candidate_nll == pytest.approx(-q[rows, targets], abs=1e-5)
        assert positions.kl.min() > 1e-4


def test_the_lane_served_is_what_the_engine_scores(pair, panel):
    found = measure_fidelity(*pair, panel, options("served", chunk=512))
    engines = [LLM(folder, EngineSettings(device="cpu", dtype="float32")) for folder in pair]
    for window, (_, positions) in zip(panel.windows, found.runs[0], strict=True):
        p, q = (log_probabilities(llm.score_all(window.token_ids)[:-1]) for llm in engines)
        assert positions.kl == pytest.approx((np.exp(p) * (p - q)).sum(1), abs=1e-5, rel=1e-5)
    assert found.settings["cache_dtype"] == "float32"
    assert found.settings["chunk"] == 512


def test_the_lane_weights_decodes_what_is_quantised(tmp_path):
    """A folder of the decoded matrices in float32 is no different from the quantised one."""
    panel, checkpoint = tiny_panel(tmp_path, lengths=(70,)), open_checkpoint(BASE2)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.float32)
    decoded = {
        name: value if isinstance(value, torch.Tensor) else value.decode()
        for name, value in params.items()
    }
    for name, value in decoded.items():
        if name.endswith("conv1d.weight") and value.dim() == 2:
            decoded[name] = value.unsqueeze(1)
    twin = tmp_path / "twin"
    twin.mkdir()
    (twin / "config.json").write_bytes((BASE2 / "config.json").read_bytes())
    save_file({name: t.contiguous() for name, t in decoded.items()}, twin / "model.safetensors")
    found = measure_fidelity(BASE2, twin, panel, options(runs=1))
    assert is_zero(every(found))
    assert found.reference["map_sha256"] != found.candidate["map_sha256"]
    assert every(measure_fidelity(NANO, twin, panel, options(runs=1))).kl.mean() > 0.01


@pytest.mark.parametrize("lane", LANES)
def test_every_run_is_cold_and_gives_the_same_bits(pair, panel, lane, monkeypatch):
    opened = []
    whole = Lane.open

    def counted(self, folder):
        opened.append(folder.name)
        return whole(self, folder)

    monkeypatch.setattr(Lane, "open", counted)
    found = measure_fidelity(*pair, panel, options(lane, runs=3))
    assert opened == ["reference", *["candidate"] * 3]
    assert len(set(found.settings["hidden_sha256"])) == 1
    for run in (1, 2):
        assert every(found, run).kl.tobytes() == every(found).kl.tobytes()


def test_runs_that_differ_are_told_apart(pair, panel, monkeypatch):
    """The last run loads another folder: nothing of the run before is reused."""
    whole, opened = Lane.open, []

    def changing(self, folder):
        opened.append(folder)
        return whole(self, pair[0] if len(opened) == 3 else folder)

    monkeypatch.setattr(Lane, "open", changing)
    found = measure_fidelity(*pair, panel, options())
    assert len(set(found.settings["hidden_sha256"])) == 2
    assert [is_zero(every(found, run)) for run in (0, 1)] == [False, True]


@pytest.mark.parametrize("lane", LANES)
def test_a_kept_capture_spares_the_reference(pair, panel, tmp_path, lane, monkeypatch):
    kept = options(lane, capture_dir=tmp_path / "kept", runs=1)
    fresh = measure_fidelity(*pair, panel, options(lane, runs=1))
    first = measure_fidelity(*pair, panel, kept)
    opened, whole = [], Lane.open
    monkeypatch.setattr(Lane, "open", lambda s, f: (opened.append(f.name), whole(s, f))[1])
    second = measure_fidelity(*pair, panel, kept)
    assert opened == ["candidate"]
    assert first.settings == second.settings == fresh.settings
    for found in (first, second):
        assert every(found).kl.tobytes() == every(fresh).kl.tobytes()


def test_lanes_and_panels_have_captures_of_their_own(pair, panel, tmp_path):
    keys = set()
    for lane in LANES:
        for each in (panel, tiny_panel(tmp_path, seed=5)):
            found = measure_fidelity(*pair, each, options(lane, runs=1))
            keys.add(found.settings["capture"]["key"])
    assert len(keys) == 4


@pytest.mark.parametrize("lane", LANES)
def test_what_is_measured_twice_in_one_process_is_named_alike(pair, panel, lane):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = [measure_fidelity(*pair, panel, options(lane, runs=1)) for _ in range(2)]
    finally:
        torch.set_num_threads(before)
    assert found[0].device == found[1].device
    assert found[0].settings == found[1].settings
    assert found[0].device["num_threads"] == 1  # this model is small


def test_networks_in_memory_give_the_figures_of_the_folders(pair, panel):
    found = measure_fidelity(*pair, panel, options(runs=1))
    ticks = []
    networks = [load_plain(folder, "cpu") for folder in pair]
    again = compare_networks(*networks, panel, lambda: ticks.append(1))
    assert len(ticks) == len(panel.windows)
    for (name, one), (other_name, other) in zip(found.runs[0], again, strict=True):
        assert name == other_name
        assert one.kl.tobytes() == other.kl.tobytes()


def test_a_network_of_parameters_in_memory_is_decoded_and_leaves_them(pair, panel):
    checkpoint = open_checkpoint(NANO)
    config = Glm5NextConfig.from_dict(checkpoint.config)
    assignment = assign(config, checkpoint.tensors)
    params = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.bfloat16)
    plain = plain_network(config, params)
    found = compare_networks(load_plain(NANO, "cpu"), plain, panel)
    assert all(is_zero(positions) for _, positions in found)
    assert params[HEAD].dtype == torch.bfloat16
    name = "model.language_model.layers.1.mlp.experts.3.up_proj.weight"
    quantised = fp8_block.FORMAT.quantize(params[name].float())
    changed = plain_network(config, {**params, name: quantised})
    found = compare_networks(plain, changed, panel)
    assert 0 < max(positions.kl.max() for _, positions in found) < 1


def test_drafting_and_pictures_are_loaded_and_not_measured(pair, panel, tmp_path):
    tensors, _ = pair_tensors()
    layer = "model.language_model.layers.5."
    for name in tensors:
        if name.startswith((layer, "model.visual.")):
            tensors[name] = torch.zeros_like(tensors[name])
    blind = write_folder(tmp_path / "blind", tiny_config(), tensors)
    assert is_zero(every(measure_fidelity(pair[0], blind, panel, options(runs=1))))


def test_positions_that_are_not_finite_are_counted(pair, panel, tmp_path):
    tensors, _ = pair_tensors()
    tensors[HEAD][7] *= 3e38
    loud = write_folder(tmp_path / "loud", tiny_config(), tensors)
    found = every(measure_fidelity(pair[0], loud, panel, options(runs=1)))
    network, expected = load_plain(loud, "cpu"), []
    for window in panel.windows:
        with torch.inference_mode():
            logits = network.full(torch.tensor([window.token_ids]))[0, :-1]
        expected += logits.isfinite().all(1).tolist()
    assert found.finite.tolist() == expected
    assert 0 < sum(expected) < len(expected)
    assert np.isnan(found.kl[~found.finite]).all()
    assert np.isfinite(found.kl[found.finite]).all()


def test_progress_goes_through_every_stage_to_its_end(pair, panel):
    seen = []
    measure_fidelity(*pair, panel, options(), seen.append)
    stages = list(dict.fromkeys(each.stage for each in seen))
    assert stages == [
        "hashing the reference",
        "hashing the candidate",
        "reference",
        "candidate, run 1 of 2",
        "candidate, run 2 of 2",
    ]
    for stage in stages:
        own = [each for each in seen if each.stage == stage]
        assert own[0].done == 0
        assert own[-1].done == own[-1].total > 0
        assert [each.done for each in own] == sorted(each.done for each in own)
    assert {each.total for each in seen if "candidate, run" in each.stage} == {3}


def test_what_was_measured_is_named(pair, panel):
    found = measure_fidelity(*pair, panel, options(runs=1))
    assert (found.reference["name"], found.candidate["name"]) == ("reference", "candidate")
    assert found.lane == "weights"
    assert found.device["kind"] == "cpu"
    assert set(found.op_table.values()) == {"reference"}
    assert found.settings["dtype"] == "float32"
    served = measure_fidelity(*pair, panel, options("served", runs=1))
    assert served.op_table["kda_chunk"] == "cpu"


def test_weights_that_do_not_fit_are_refused_before_they_are_read(pair, panel, monkeypatch):
    need = 4 * sum(t.numel() for t in pair_tensors()[0].values())
    seen = []
    monkeypatch.setattr("emberbox.device.host_memory_bytes", lambda: need - 1)
    with pytest.raises(MemoryRefused, match=f"takes {need:,} bytes.*has {need - 1:,}"):
        measure_fidelity(*pair, panel, options(), seen.append)
    assert seen == []


@pytest.mark.parametrize("rows", [1, 7, 95, 96, 97])
def test_a_head_is_read_some_rows_at_a_time(pair, monkeypatch, rows):
    head = load_plain(pair[0], "cpu").lm_head
    hidden = torch.randn(5, 40, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(lanes, "HEAD_ROWS", rows)
    found = lanes.Head(head).logits(hidden)
    assert torch.allclose(found, hidden @ head.weight.T, rtol=1e-5, atol=1e-5)
    narrow = lanes.Linear(lanes.OpTable.reference(), head.weight.bfloat16())
    assert torch.equal(lanes.Head(narrow).logits(hidden), found)  # its weights are bf16 anyway


@pytest.mark.parametrize("block", [1, 50, 1000])
def test_positions_are_taken_some_at_a_time(pair, panel, monkeypatch, block):
    networks = [load_plain(folder, "cpu") for folder in pair]
    whole = compare_networks(*networks, panel)
    monkeypatch.setattr(fidelities, "POSITION_BLOCK", block)
    for (_, one), (_, other) in zip(whole, compare_networks(*networks, panel), strict=True):
        assert one.kl == pytest.approx(other.kl, abs=1e-5)  # matrix products round differently
        assert one.top5.tolist() == other.top5.tolist()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"lane": "both"}, "lane: 'both'"),
        ({"runs": 0}, "runs: 0, expected 1 to 100"),
        ({"chunk": 0}, "chunk: 0, expected 1 to 65536"),
    ],
)
def test_options_are_checked(given, said):
    with pytest.raises(SettingsError, match=said):
        FidelityOptions(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("lane", LANES)
def test_a_gpu_finds_a_model_to_be_itself(pair, panel, lane):
    on_gpu = FidelityOptions(lane=lane, device="cuda", chunk=64)
    assert is_zero(every(measure_fidelity(pair[0], pair[0], panel, on_gpu)))


@pytest.mark.gpu
def test_a_gpu_gives_the_figures_of_a_cpu_in_the_lane_weights(pair, panel):
    found = every(measure_fidelity(*pair, panel, FidelityOptions(device="cuda")))
    expected = every(measure_fidelity(*pair, panel, options()))
    assert float(np.median(np.abs(found.kl - expected.kl))) < 1e-5
