"""Write a run as a checkpoint in the released layout, and load it back as a check.

    python -m training.export RUN FOLDER [--assets FOLDER]

Matrices become BF16; what the release keeps in F32 stays F32. The router bias is exported as it was
trained, around 10. Tokenizer, chat template and preprocessor come from --assets unless they lie in
FOLDER already.
"""

import argparse
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from emberbox.formats.dtypes import DTYPE_TAGS
from emberbox.model.config import Glm5NextConfig
from emberbox.model.parameters import Kind, parameter_table
from emberbox.model.weights import assign, load_parameters
from emberbox.store.checkpoint import open_checkpoint
from emberbox.store.digests import write_digests
from emberbox.store.writer import CheckpointWriter
from training.parameters import released
from training.shape import EOS_IDS, PAD_ID, config_json
from training.state import load_weights

MAX_SHARD_BYTES = 7_900_000  # of data: with its header a shard stays under 8 MB
ASSETS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
)


def checkpoint_tensors(config: Glm5NextConfig, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every released tensor, in its released type, in the order of the parameter table.

    Raises KeyError for one that `params` lacks.
    """
    held = released(params)
    tensors = {}
    for parameter in parameter_table(config):
        dtype = torch.float32 if parameter.kind is Kind.FP32 else torch.bfloat16
        tensor = held[parameter.name].detach().to("cpu", dtype)
        tensors[parameter.name] = tensor.reshape(parameter.shape).contiguous()
    return tensors


def export(params: Mapping[str, Tensor], config: Mapping[str, object], folder: Path) -> int:
    """Write weights, their digests and both config files; the number of bytes of tensors.

    Weights that are in `folder` are replaced. Raises LoadRefused if the result does not load.
    """
    tensors = checkpoint_tensors(Glm5NextConfig.from_dict(config), params)
    with CheckpointWriter(folder, MAX_SHARD_BYTES, overwrite=True) as writer:
        for name, tensor in tensors.items():
            data = tensor.view(-1).view(torch.uint8).numpy()
            writer.add(name, DTYPE_TAGS[tensor.dtype], tuple(tensor.shape), data)
    write_digests(folder)
    _write_json(folder / "config.json", config)
    generation = {"do_sample": False, "eos_token_id": EOS_IDS, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", generation)
    check(folder, tensors)
    return sum(tensor.nbytes for tensor in tensors.values())


def check(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load strictly, and hold every parameter against what was written."""
    checkpoint = open_checkpoint(folder)
    config = Glm5NextConfig.from_dict(checkpoint.config, checkpoint.mtp_config)
    assignment = assign(config, checkpoint.tensors)
    loaded = load_parameters(checkpoint, assignment, device="cpu", dtype=torch.bfloat16)
    wrong = [
        name
        for name, tensor in tensors.items()
        if isinstance(held := loaded.get(name), Tensor)
        and not torch.equal(held.float(), tensor.float())
    ]
    if wrong or set(tensors) != set(checkpoint.tensors):
        raise ValueError(f"{folder}: reads back differently: {wrong[:5]}")


def copy_assets(source: Path, folder: Path) -> None:
    """Tokenizer, template and preprocessor. Raises FileNotFoundError naming what is missing."""
    missing = [name for name in ASSETS if not (source / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{source} lacks {', '.join(missing)}")
    for name in ASSETS:
        if source.resolve() != folder.resolve():
            shutil.copyfile(source / name, folder / name)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="folder of a run")
    parser.add_argument("folder", type=Path, help="where the checkpoint goes")
    parser.add_argument("--assets", type=Path, help="folder with tokenizer and template")
    options = parser.parse_args()
    size = export(load_weights(options.run), config_json(), options.folder)
    copy_assets(options.assets or options.folder, options.folder)
    print(f"{options.folder}: {size:,} bytes of tensors")  # noqa: T201


if __name__ == "__main__":
    main()
