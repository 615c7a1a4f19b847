"""Tuning after quantising: what it gains, what it may touch, and what it refuses."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from emberbox.compress import tune as tuning
from emberbox.compress.beside import HOW
from emberbox.compress.tune import Side, TuneOptions, prepare_tuning, tune
from emberbox.compress.tune_folder import Contents, write_folder
from emberbox.compress.tune_operands import Factored, Tunable
from emberbox.compress.tune_report import Outcome
from emberbox.engine.llm import LLM
from emberbox.errors import (
    CheckpointError,
    EnvironmentProblem,
    LoadRefused,
    MeasureError,
    MemoryRefused,
    SettingsError,
)
from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.measure.artifact import artifact
from emberbox.measure.fidelity import FidelityOptions, measure_fidelity
from emberbox.measure.panel import load_panel
from emberbox.settings import EngineSettings
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.checksums import verify_checksums
from emberbox.store.writer import CheckpointWriter
from tests.helpers.nano import NANO
from tests.helpers.published import LAYOUTS
from tests.helpers.quantised_folder import nano_tensors, random_exl3, write_quantised

BASE2 = NANO.with_name("ember-nano-base2")
SMALL = {"rows": 24, "cols": 48, "step_rows": 3, "device": "cpu"}
FEW = TuneOptions(**SMALL, steps=2, lr=1e-3)


def data(checkpoint, name) -> bytes:
    info = checkpoint.tensors[name]
    buffer = bytearray(info.num_bytes)
    checkpoint.read_into(info, buffer)
    return bytes(buffer)


def changed(before: Path, after: Path) -> set[str]:
    """Names whose bytes differ; names, dtypes, shapes and places may not."""
    one, other = open_checkpoint(before), open_checkpoint(after)
    place = {n: (i.dtype, i.shape, i.start, i.file.name) for n, i in one.tensors.items()}
    assert place == {n: (i.dtype, i.shape, i.start, i.file.name) for n, i in other.tensors.items()}
    return {name for name in one.tensors if data(one, name) != data(other, name)}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """ember-nano-base2 with a digest `how`, after ten steps, and how that went."""
    source = Path(shutil.copytree(BASE2, tmp_path_factory.mktemp("source") / BASE2.name))
    report = json.loads((source / "compression.json").read_text())
    (source / "compression.json").write_text(json.dumps(report | {HOW: "0" * 64}))
    folder = tmp_path_factory.mktemp("tuned") / "better"
    options = TuneOptions(**SMALL, steps=10, lr=2e-3)
    return folder, tune(prepare_tuning(NANO, source, folder, options))


def learner_of(prepared):
    """What `tune` learns with, and its teacher."""
    device, compressed = torch.device("cpu"), prepared.candidate
    teacher = tuning._Teacher.capture(prepared, device, lambda _: None)
    tunable = Tunable.load(compressed.checkpoint, compressed.trunk, device)
    return tuning._Learner(prepared, teacher, tunable, lambda _: None), teacher


@pytest.fixture
def copied(tmp_path):
    """A candidate that a test may damage."""
    return Path(shutil.copytree(BASE2, tmp_path / "copied"))


# -- what it gains --------------------------------------------------------------------------------


def test_ten_steps_lower_the_divergence_on_rows_never_learnt_from(tuned):
    _, outcome = tuned
    assert [step for step, _ in outcome.curve] == list(range(11))
    assert 0.05 < outcome.best < 0.985 * outcome.first < 0.6
    assert outcome.last < outcome.first
    assert outcome.num_refused == 0


def test_the_figure_is_of_what_the_folder_holds(tuned, tmp_path):
    """Read back, the result starts where it was left: nothing was lost on the way to the disk."""
    folder, outcome = tuned
    options = TuneOptions(**SMALL, steps=1, lr=1e-3)
    learner, _ = learner_of(prepare_tuning(NANO, folder, tmp_path / "again", options))
    learner._judge(0)
    assert learner._curve[0][1] == pytest.approx(outcome.best, rel=1e-6)


def test_the_panel_says_that_it_is_closer_and_the_receipt_that_it_was_tuned(tuned, tmp_path):
    folder, outcome = tuned
    panel, options = load_panel("nano-short"), FidelityOptions(device="cpu", runs=1)
    kl = {}
    for candidate in (BASE2, folder):
        found = measure_fidelity(NANO, candidate, panel, options)
        kl[candidate] = sum(float(p.kl.sum()) for _, p in found.runs[0])
    assert kl[folder] < 0.99 * kl[BASE2]
    about = found.candidate["about"]
    assert about["tuning"]["text"] == {
        "source": "the shipped text",
        "sha256": about["calibration"]["sha256"],
        "rows": 24,
        "cols": 48,
        "seed": 1,
        "held_out_rows": 3,
        "held_out": "the last of each 8 rows",
    }
    assert about["tuning"]["held_out_kl"]["written"] == outcome.best
    assert about["tuning"]["candidate"]["map_sha256"] == artifact(BASE2)["map_sha256"]


def test_the_engine_loads_it_and_answers(tuned):
    llm = LLM(tuned[0], EngineSettings(device="cpu", dtype="float32"))
    reply = llm.chat([{"role": "user", "content": "Count from 3 to 6."}])
    assert "4" in reply.text


# -- what it may touch ----------------------------------------------------------------------------


def test_only_scales_and_norms_of_the_trunk_differ(tuned):
    names = changed(BASE2, tuned[0])
    scales = {n for n in names if n.endswith((".suh", ".svh"))}
    norms = {n for n in names - scales if "norm" in n and ".indexer." not in n}
    assert names == scales | norms
    assert not any(".layers.8." in n or "visual" in n or ".wq_b." in n for n in names)
    assert len(scales) > 600
    assert len(norms) > 20
    assert artifact(BASE2)["storage"] == artifact(tuned[0])["storage"]


def test_every_other_file_is_the_candidates_and_the_checksums_fit(tuned):
    folder, outcome = tuned
    ours = {"README.md", "SHA256SUMS", "compression.json", "tensors.sha256.json"}
    others = {p.name for p in BASE2.iterdir()} - ours
    assert {p.name for p in folder.iterdir()} == others | ours
    for name in others:
        assert (folder / name).stat().st_size == (BASE2 / name).stat().st_size
        if not name.endswith(".safetensors"):
            assert (folder / name).read_bytes() == (BASE2 / name).read_bytes()
    assert verify_checksums(folder) == len(others) + 3
    card = (folder / "README.md").read_text("utf-8")
    assert "# better\n" in card
    assert "emberbox serve better\n" in card
    assert f"{outcome.first:.4f} nats before, {outcome.best:.4f} after" in card
    assert [path for path in folder.parent.iterdir() if path != folder] == []


def test_compress_does_not_take_it_for_its_own(tuned):
    """`compress --resume` compares the digest `how`: a tuned result has another one."""
    found, before = (
        json.loads((folder / "compression.json").read_text()) for folder in (tuned[0], BASE2)
    )
    assert len(found[HOW]) == 64
    assert found[HOW] != "0" * 64
    assert found["matrices"] == before["matrices"]


def test_the_same_options_give_the_same_bytes(tmp_path):
    sums = []
    for name in ("a", "b"):
        tune(prepare_tuning(NANO, BASE2, tmp_path / name / "out", FEW))
        sums.append((tmp_path / name / "out" / "SHA256SUMS").read_text())
    assert sums[0] == sums[1]
    assert len(changed(BASE2, tmp_path / "a" / "out")) > 600


# -- other layouts --------------------------------------------------------------------------------


def write_mixed(folder: Path) -> set[str]:
    """The released layout with some matrices in random EXL3; returns the modules that are."""
    at = "model.language_model.layers."
    modules = {f"{at}0.self_attn.{x}_proj" for x in "qv"}  # k stays plain
    modules |= {f"{at}3.self_attn.kv_b_proj", f"{at}3.mlp.experts.5.down_proj"}
    modules |= {f"{at}1.mlp.shared_experts.gate_proj", f"{at}8.self_attn.o_proj"}
    tensors = dict(nano_tensors())
    for module in modules:
        entry = SimpleNamespace(name=module, bits=3)
        found = random_exl3(tensors.pop(f"{module}.weight"), entry, "mul1")
        names = found.format.part_names(module)
        tensors |= {names[part]: value for part, value in found.parts.items()}
    with CheckpointWriter(folder, 4_000_000) as writer:
        for name, value in tensors.items():
            raw = value.contiguous().view(-1).view(torch.uint8).numpy()
            writer.add(name, DTYPE_TAGS[value.dtype], tuple(value.shape), raw)
    for path in NANO.iterdir():
        if "safetensors" not in path.name and path.name != "tensors.sha256.json":
            shutil.copy(path, folder)
    return modules


def test_split_projections_and_kv_b_of_the_released_layout(tmp_path):
    modules = write_mixed(tmp_path / "mixed")
    prepared = prepare_tuning(NANO, tmp_path / "mixed", tmp_path / "out", FEW)
    operands = Tunable.load(
        prepared.candidate.checkpoint, prepared.candidate.trunk, torch.device("cpu")
    )
    found = operands.operands(operands.base)
    factored = {n.removesuffix(".weight") for n, v in found.items() if isinstance(v, Factored)}
    mtp = {m for m in modules if ".layers.8." in m}
    assert modules - factored - mtp == {m for m in modules if m.endswith("kv_b_proj")}
    tune(prepared)
    names = changed(tmp_path / "mixed", tmp_path / "out")
    scales = {f"{m}.{s}" for m in modules - mtp for s in ("suh", "svh")}
    assert {n for n in names if "norm" not in n} == scales


@pytest.mark.parametrize("layout", ["whole-2.05", "experts-2"])
def test_published_layouts(tmp_path, layout):
    write_quantised(tmp_path / "random", LAYOUTS[layout])
    options = replace(FEW, lr=1e-2)
    outcome = tune(prepare_tuning(NANO, tmp_path / "random", tmp_path / "out", options))
    assert outcome.best < outcome.first
    names = changed(tmp_path / "random", tmp_path / "out")
    assert all(n.endswith((".suh", ".svh")) or "norm" in n for n in names)
    assert any(".qkv_proj.suh" in n for n in names) == (layout == "whole-2.05")
    assert any(".experts.5.up_proj.svh" in n for n in names)


# -- what it refuses ------------------------------------------------------------------------------


def refused(kind, candidate, folder, options=FEW, reference=NANO):
    with pytest.raises(kind) as caught:
        prepare_tuning(reference, candidate, folder, options)
    return str(caught.value)


def test_models_that_do_not_belong_together(tmp_path, copied):
    plain = Path(shutil.copytree(NANO, tmp_path / "plain"))
    assert "no matrix of the trunk is EXL3" in refused(CheckpointError, plain, tmp_path / "out")
    config = json.loads((copied / "config.json").read_text())
    config["text_config"]["swiglu_limit"] = 5.0
    (copied / "config.json").write_text(json.dumps(config))
    assert "swiglu_limit: 4.0 and 5.0" in refused(CheckpointError, copied, tmp_path / "out")


def test_a_reference_that_is_the_candidate_or_was_tuned(tmp_path, tuned, copied):
    (tmp_path / "link").symlink_to(copied)
    said = refused(SettingsError, copied, tmp_path / "out", reference=tmp_path / "link")
    assert "is both reference and candidate" in said
    said = refused(SettingsError, BASE2, tmp_path / "out", reference=tuned[0])
    assert "is itself a tuned copy, by its compression.json" in said


def test_another_tokenizer(tmp_path, copied):
    with (copied / "tokenizer.json").open("a") as file:
        file.write("\n")
    assert "tokenizer.json: sha256" in refused(CheckpointError, copied, tmp_path / "out")
    (copied / "tokenizer.json").unlink()
    assert "cannot be read" in refused(CheckpointError, copied, tmp_path / "out")


def test_a_folder_that_is_there_or_lies_in_a_source(tmp_path, copied):
    (tmp_path / "out").mkdir()
    assert "is there already" in refused(CheckpointError, BASE2, tmp_path / "out")
    assert "lies inside" in refused(SettingsError, copied, copied / "out")
    assert "lies inside" in refused(SettingsError, BASE2, NANO / "out")


def test_a_name_that_leaves_no_bytes_for_the_draft(tmp_path):
    long = "ä" * 119  # of two bytes each
    said = refused(SettingsError, BASE2, tmp_path / long)
    assert "a name of 238 bytes, expected at most 237" in said
    assert "File name too long" in refused(EnvironmentProblem, BASE2, tmp_path / ("x" * 256) / "o")
    prepare_tuning(NANO, BASE2, tmp_path / long[:-1] / "out", FEW)
    folder = tmp_path / f"{long[:-1]}a"
    write_folder(open_checkpoint(BASE2), folder, Contents({}, lambda _: {}))
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_drafts_of_killed_runs_are_told_of(tmp_path, caplog):
    drafts = {f".out-{x}.partial" for x in ("0123abcd", "ffffffff")}
    for name in drafts | {".other-0123abcd.partial", ".out-x.partial"}:
        (tmp_path / name).mkdir()
    prepare_tuning(NANO, BASE2, tmp_path / "out", FEW)
    told = [r.getMessage() for r in caplog.records if "by a run that was killed" in r.getMessage()]
    assert {Path(message.partition(":")[0]).name for message in told} == drafts
    assert all("remove it" in message for message in told)


def test_more_memory_than_there_is(tmp_path):
    options = TuneOptions(step_rows=10**8, device="cpu")
    said = refused(MemoryRefused, BASE2, tmp_path / "out", options)
    assert "a step of 25,600,000,000 tokens" in said
    assert "--step-rows" in said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"rows": 1}, "rows: 1, expected 2"),
        ({"steps": 0, "lr": 0.0}, "steps: 0, expected 1 or more; lr: 0.0"),
        ({"lr": float("nan")}, "lr: nan"),
        ({"steps": 1_000_001}, "steps: 1000001, expected at most 1,000,000"),
        ({"seed": 2**63}, "seed: 9223372036854775808, expected at most 9,223,372"),
        ({"seed": -1}, "seed: -1, expected 0 or more"),
        ({"step_rows": 10**400}, "step_rows: 10+, expected at most"),
    ],
)
def test_numbers_out_of_range(values, said):
    with pytest.raises(SettingsError, match=said):
        TuneOptions(**values)


def test_a_damaged_scale_is_named_and_nothing_is_written(tmp_path, copied):
    checkpoint = open_checkpoint(copied)
    info = checkpoint.tensors["lm_head.suh"]
    with info.file.open("r+b") as file:
        file.seek(info.start)
        file.write(b"\x00\x7e")  # NaN
    for name in ("SHA256SUMS", "tensors.sha256.json"):  # made that way, not damaged later
        (copied / name).unlink()
    prepared = prepare_tuning(NANO, copied, tmp_path / "out", FEW)
    with pytest.raises(LoadRefused, match=r"lm_head\.suh: holds NaN"):
        tune(prepared)
    assert {path.name for path in tmp_path.iterdir()} == {"copied"}


def test_nothing_gained_is_nothing_written(tmp_path):
    """A rate of one destroys the model in the first step."""
    options = TuneOptions(**SMALL, steps=1, lr=1.0)
    prepared = prepare_tuning(NANO, BASE2, tmp_path / "out", options)
    with pytest.raises(MeasureError, match="did not lower the held-out KL"):
        tune(prepared)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("stage", ["reference", "tuning", "writing"])
def test_ended_at_any_stage_it_leaves_nothing(tmp_path, stage):
    seen = []

    def listener(progress):
        seen.append(progress.stage)
        if progress.stage == stage:
            raise KeyboardInterrupt

    prepared = prepare_tuning(NANO, BASE2, tmp_path / "out", FEW)
    with pytest.raises(KeyboardInterrupt):
        tune(prepared, listener)
    assert seen[-1] == stage
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_not_finite_is_left_out_and_many_end_the_run(tmp_path):
    options = TuneOptions(**SMALL, steps=9, lr=1e-3)
    prepared = prepare_tuning(NANO, BASE2, tmp_path / "out", options)
    learner, teacher = learner_of(prepared)
    bad = prepared.text.learnt[0]
    teacher.hidden[bad] = torch.full_like(teacher.hidden[bad], torch.nan)
    learner._step(0, [bad])
    assert learner._num_refused == 1
    assert not learner._offsets.any()
    learner._step(1, [prepared.text.learnt[1]])
    assert learner._num_refused == 1
    assert 0 < learner._offsets.abs().max() <= 1e-3
    with pytest.raises(MeasureError, match="6 of 9 steps were not finite"):
        for step in range(4, 9):
            learner._step(step, [bad])


def test_the_best_step_is_kept_and_held_rows_are_never_taken(tmp_path, monkeypatch):
    """Steps that do nothing, then one that does harm."""
    options = TuneOptions(**(SMALL | {"rows": 9}), steps=4)
    prepared = prepare_tuning(NANO, BASE2, tmp_path / "out", options)
    learner, _ = learner_of(prepared)
    taken = []

    def harm(step, rows):
        taken.extend(rows)
        learner._offsets.data.fill_(0.2 if step == 3 else 1e-9)

    monkeypatch.setattr(learner, "_step", harm)
    with pytest.raises(MeasureError, match="did not lower"):
        learner.run()
    assert set(taken) == set(prepared.text.learnt)
    assert not set(taken) & set(prepared.text.held)
    assert [step for step, _ in learner._curve] == [0, 1, 2, 3, 4]
    kls = [kl for _, kl in learner._curve]
    assert kls[4] > 1.1 * kls[0] == pytest.approx(1.1 * kls[3], rel=1e-6)
    assert not learner._best.any()


def test_the_first_of_the_lowest_is_what_is_written():
    outcome = Outcome(((0, 0.3), (5, 0.1), (10, 0.1), (15, 0.2)), 0, ())
    assert (outcome.first, outcome.best, outcome.best_step, outcome.last) == (0.3, 0.1, 5, 0.2)


@pytest.mark.parametrize(
    ("step_rows", "cols", "lr", "rate"),
    [(32, 256, None, 3e-3), (64, 512, None, 3e-3), (8, 256, None, 1.5e-3), (8, 256, 0.01, 0.01)],
)
def test_the_learning_rate_falls_with_the_tokens_of_a_step(step_rows, cols, lr, rate):
    assert TuneOptions(step_rows=step_rows, cols=cols, lr=lr).rate == rate


def test_side_leaves_out_what_is_not_the_trunk():
    trunk = Side.open(BASE2).trunk
    assert {part.value for part in trunk.parts} == {"trunk"}
