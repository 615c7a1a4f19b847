"""What a receipt says of a folder: hashes of all bytes, and where which format takes how many."""

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from emberbox.errors import CheckpointError, LoadRefused, MeasureError
from emberbox.measure.artifact import artifact, part_of
from emberbox.model.config import Glm5NextConfig
from emberbox.model.weights import assign
from emberbox.store.checkpoint import INDEX_NAME, open_checkpoint
from tests.helpers.nano import NANO
from tests.helpers.published import LAYOUTS
from tests.helpers.quantised_folder import write_quantised
from tests.helpers.tiny import tiny_config, tiny_tensors, write_folder

BASE2 = NANO.with_name("ember-nano-base2")
HEAD = "lm_head.weight"


@pytest.fixture
def tiny():
    return tiny_tensors(Glm5NextConfig.from_dict(tiny_config()))


def data_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def write_split(folder, tensors):
    """The same tensors in two shards."""
    write_folder(folder, tiny_config(), {})
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number + 1:05}-of-00002.safetensors"
        save_file({name: tensors[name].contiguous() for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_the_map_is_of_the_tensors_however_they_lie_in_files(tmp_path, tiny):
    whole = artifact(write_folder(tmp_path / "a", tiny_config(), tiny))
    split = artifact(write_split(tmp_path / "b", tiny))
    listed = [
        [
            name,
            {torch.bfloat16: "BF16", torch.float32: "F32"}[tiny[name].dtype],
            list(tiny[name].shape),
            hashlib.sha256(data_of(tiny[name])).hexdigest(),
        ]
        for name in sorted(tiny)
    ]
    text = json.dumps(listed, separators=(",", ":"))
    assert whole["map_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert split["map_sha256"] == whole["map_sha256"]
    assert split["files"].keys() != whole["files"].keys()
    assert (whole["name"], split["name"]) == ("a", "b")
    assert whole["num_tensors"] == len(tiny)
    assert whole["num_bytes"] == sum(tensor.nbytes for tensor in tiny.values())


def test_one_changed_bit_changes_the_map(tmp_path, tiny):
    before = artifact(write_folder(tmp_path / "a", tiny_config(), tiny))
    tiny[HEAD].view(torch.int16)[-1, -1] ^= 1
    after = artifact(write_folder(tmp_path / "b", tiny_config(), tiny))
    assert after["map_sha256"] != before["map_sha256"]
    assert after["storage"] == before["storage"]


def test_every_visible_file_is_hashed_and_read_once(tmp_path, tiny):
    folder = write_folder(tmp_path / "a", tiny_config(), tiny)
    (folder / "notes").mkdir()
    (folder / "notes" / "read.me").write_text("one")
    for name in (".hidden", ".git/config"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("two")
    read = []
    found = artifact(folder, read.append)
    files = [folder / name for name in ("config.json", "model.safetensors", "notes/read.me")]
    assert found["files"] == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    assert found["config_sha256"] == found["files"]["config.json"]
    assert sum(read) == sum(path.stat().st_size for path in files)


def test_storage_of_the_shipped_two_bit_model():
    found = artifact(BASE2)
    rows = {(row["part"], row["format"]): row for row in found["storage"]}
    assert rows["routed experts", "exl3"] == {
        "part": "routed experts",
        "format": "exl3",
        "bits": 2.252,
        "weights": 7 * 16 * 3 * 128 * 128,
        "bytes": 1_549_632,
    }
    assert rows["head", "exl3"]["weights"] == rows["embedding", "bf16"]["weights"] == 4096 * 128
    assert rows["embedding", "bf16"]["bits"] == 16
    assert {part for part, _ in rows} == {
        "embedding",
        "head",
        "attention",
        "dense feed-forward",
        "shared expert",
        "routed experts",
        "norms, routers and the rest",
        "vision tower",
        "MTP layer, attention",
        "MTP layer, shared expert",
        "MTP layer, routed experts",
        "MTP layer, input projection",
        "MTP layer, norms, routers and the rest",
    }
    assert sum(row["bytes"] for row in found["storage"]) == found["num_bytes"] == 8_065_844
    assert sum(row["weights"] for row in found["storage"]) == sum(
        row["weights"] for row in artifact(NANO)["storage"]
    )


def test_norms_and_the_rest_hold_no_matrix_that_is_compressed():
    """Every two-dimensional weight of a layer has a part of its own, but routers and mixing."""
    checkpoint = open_checkpoint(NANO)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    found = assign(config, checkpoint.tensors)
    rest = {
        piece.parameter.name.rpartition("layers.")[2].partition(".")[2]
        for placement in found.placements
        for piece in placement.pieces
        if part_of(piece.parameter).endswith("the rest") and len(piece.parameter.shape) == 2
    }
    assert rest == {"mlp.gate.weight", "hc_attn_fn", "hc_ffn_fn"}
    rows = {(row["part"], row["format"]): row["weights"] for row in artifact(BASE2)["storage"]}
    assert rows["MTP layer, input projection", "exl3"] == 2 * 128 * 128


def test_rates_of_one_format_have_rows_of_their_own(tmp_path):
    write_quantised(tmp_path / "mixed", LAYOUTS["experts-2-3"])
    rows = [row for row in artifact(tmp_path / "mixed")["storage"] if row["format"] == "exl3"]
    experts = [(row["bits"], row["weights"]) for row in rows if row["part"] == "routed experts"]
    layer = 16 * 3 * 128 * 128
    # 128 x 128 with scales for both sides and a marker; 3 bits in layers 3 and 6.
    assert experts == [(2.252, 5 * layer), (3.252, 2 * layer)]


def test_what_compression_says_of_itself_is_kept_without_the_matrices(tmp_path):
    assert artifact(NANO)["about"] == {}
    said = json.loads((BASE2 / "compression.json").read_text())
    assert set(said) > {"matrices"}
    del said["matrices"]
    assert artifact(BASE2)["about"] == said
    folder = tmp_path / "copy"
    shutil.copytree(BASE2, folder)
    (folder / "compression.json").write_text("{")
    with pytest.raises(MeasureError, match=r"compression\.json: not what `emberbox compress`"):
        artifact(folder)


def test_a_folder_that_is_no_model_is_refused(tmp_path, tiny):
    with pytest.raises(CheckpointError, match="no such folder"):
        artifact(tmp_path / "none")
    del tiny[HEAD]
    with pytest.raises(LoadRefused, match=r"lm_head\.weight: missing"):
        artifact(write_folder(tmp_path / "a", tiny_config(), tiny))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "does not start with"),
        ('{"a": 1e400}', "cannot be written again"),
        ('{"a": "\\ud800"}', "cannot be written again"),
        ('{"a": [[[[[[[1]]]]]]]}', "nested too deeply"),
        (json.dumps({"a": "x" * 20_001}), "has 20001 characters"),
        (json.dumps({"a": [0] * 10_001}), "has 10001 entries"),
    ],
)
def test_facts_that_no_receipt_can_hold_are_refused_before_weights_are_read(
    tmp_path, tiny, text, said
):
    folder, read = write_folder(tmp_path / "a", tiny_config(), tiny), []
    (folder / "compression.json").write_text(text)
    with pytest.raises(MeasureError, match=said):
        artifact(folder, read.append)
    assert read == []


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\udcff"])
def test_a_folder_whose_name_no_receipt_can_hold(tmp_path, tiny, name):
    with pytest.raises(MeasureError, match="a receipt cannot hold:\n  - its name"):
        artifact(write_folder(tmp_path / name, tiny_config(), tiny))


def test_a_file_whose_name_is_no_text(tmp_path, tiny):
    folder = write_folder(tmp_path / "a", tiny_config(), tiny)
    (folder / "a\udcff.txt").touch()
    with pytest.raises(MeasureError, match="files holds an unpaired surrogate"):
        artifact(folder)


def test_facts_without_end_are_not_read(tmp_path, tiny):
    folder = write_folder(tmp_path / "a", tiny_config(), tiny)
    (folder / "compression.json").symlink_to("/dev/zero")
    with pytest.raises(MeasureError, match=r"compression\.json: cannot be read: not a file"):
        artifact(folder)
