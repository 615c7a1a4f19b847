"""Formats as data: detection by neighbours, every reason named, a new format in one instance."""

import pytest
import torch

from emberbox.errors import OpError
from emberbox.formats import bf16, exl3, fp8_block, nvfp4
from emberbox.formats.base import Format, Part, QuantTensor
from emberbox.formats.dtypes import DTYPE_TAGS, TORCH_DTYPES
from emberbox.formats.table import FORMATS, detect
from emberbox.store.safetensors_header import DTYPE_BITS
from tests.helpers.stored import Stored


def _nothing(*_):
    raise OpError("not in this test")


# As unlike the present formats as one to come: no `.weight`, optional parts, a scalar, a free size.
EXOTIC = Format(
    name="exotic",
    parts={
        "lattice": Part(".lattice", (torch.int16,)),
        "left": Part(".left", (torch.float16,)),
        "right": Part(".right", (torch.float16,)),
        "flag": Part(".flag", (torch.int32,), optional=True),
    },
    bits=2.0,
    multiple=(16, 16),
    part_shapes=lambda shape: {
        "lattice": (shape[1] // 16, shape[0] // 16, None),
        "left": (shape[1],),
        "right": (shape[0],),
        "flag": (),
    },
    decode=_nothing,
    encode=_nothing,
)

BF16 = {"p.weight": Stored("BF16", (130, 257))}
FP8 = {
    "p.weight": Stored("F8_E4M3", (130, 257)),
    "p.weight_scale_inv": Stored("F32", (2, 3)),
}
LATTICE = {
    "p.lattice": Stored("I16", (2, 3, 32)),
    "p.left": Stored("F16", (32,)),
    "p.right": Stored("F16", (48,)),
}
EXL3 = {
    "p.trellis": Stored("I16", (2, 3, 32)),
    "p.suh": Stored("F16", (32,)),
    "p.svh": Stored("F16", (48,)),
    "p.mul1": Stored("I32", ()),
}
MODELOPT = {
    "p.weight": Stored("U8", (48, 16)),
    "p.weight_scale": Stored("F8_E4M3", (48, 2)),
    "p.weight_scale_2": Stored("F32", ()),
    "p.input_scale": Stored("F32", ()),
}
COMPRESSED = {
    "p.weight_packed": Stored("U8", (48, 16)),
    "p.weight_scale": Stored("F8_E4M3", (48, 2)),
    "p.weight_global_scale": Stored("F32", (1,)),
}
MARKED = {**LATTICE, "p.flag": Stored("I32", ())}


def test_formats_have_distinct_names_and_suffixes():
    assert len({fmt.name for fmt in FORMATS}) == len(FORMATS)
    for fmt in (*FORMATS, EXOTIC):
        assert len({part.suffix for part in fmt.parts.values()}) == len(fmt.parts)
        assert fmt.part_shapes((128, 256)).keys() == fmt.parts.keys()


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        (BF16, bf16.FORMAT),
        ({"p.weight": Stored("F16", (1, 1))}, bf16.FORMAT),
        ({"p.weight": Stored("F32", (1, 1))}, bf16.FORMAT),
        (FP8, fp8_block.FORMAT),
        (LATTICE, EXOTIC),
        (MARKED, EXOTIC),
        ({**MARKED, "p.weight": Stored("BF16", (48, 32))}, EXOTIC),
        ({k: v for k, v in LATTICE.items() if k != "p.right"}, None),
        (EXL3, exl3.FORMAT),
        ({k: v for k, v in EXL3.items() if k != "p.svh"}, exl3.FORMAT),
        ({**EXL3, "p.weight": Stored("BF16", (48, 32))}, exl3.FORMAT),
        ({**BF16, "p.trellis": EXL3["p.trellis"]}, bf16.FORMAT),
        (MODELOPT, nvfp4.FORMAT),
        ({k: v for k, v in MODELOPT.items() if k != "p.input_scale"}, nvfp4.FORMAT),
        (COMPRESSED, nvfp4.RECIPROCAL),
        ({"p.weight_scale_inv": Stored("F32", (2, 3))}, None),
        ({"q.weight": Stored("BF16", (1, 1)), "p.bias": Stored("BF16", (1,))}, None),
        ({}, None),
    ],
)
def test_the_tensors_beside_each_other_decide(infos, expected):
    assert detect("p", infos, (*FORMATS, EXOTIC)) is expected


def test_a_stray_scale_does_not_make_bf16_into_fp8():
    infos = {**FP8, "p.weight": Stored("BF16", (130, 257))}
    assert detect("p", infos) is bf16.FORMAT


def test_where_no_dtype_fits_the_nearest_format_explains():
    lone = {"p.weight": Stored("F8_E4M3", (3, 5))}
    chosen = detect("p", lone)
    assert chosen is bf16.FORMAT
    assert chosen.problems("p", (3, 5), lone) == [
        "p.weight: dtype F8_E4M3, expected BF16 or F16 or F32"
    ]
    narrow = {**FP8, "p.weight_scale_inv": Stored("BF16", (2, 3))}
    chosen = detect("p", narrow)
    assert chosen is fp8_block.FORMAT
    assert chosen.problems("p", (130, 257), narrow) == [
        "p.weight_scale_inv: dtype BF16, expected F32"
    ]


def test_expected_parts_say_names_dtypes_and_shapes():
    assert fp8_block.FORMAT.expected_parts("p", (130, 257)) == {
        "p.weight": (("F8_E4M3",), (130, 257)),
        "p.weight_scale_inv": (("F32",), (2, 3)),
    }
    assert EXOTIC.expected_parts("p", (48, 32))["p.lattice"] == (("I16",), (2, 3, None))
    assert EXOTIC.part_names("p")["flag"] == "p.flag"


@pytest.mark.parametrize(
    ("fmt", "infos", "shape"),
    [
        (bf16.FORMAT, BF16, (130, 257)),
        (fp8_block.FORMAT, FP8, (130, 257)),
        (EXOTIC, LATTICE, (48, 32)),
        (EXOTIC, MARKED, (48, 32)),
        (nvfp4.FORMAT, MODELOPT, (48, 32)),
        (nvfp4.FORMAT, {**MODELOPT, "p.weight_scale_2": Stored("F32", (1,))}, (48, 32)),
        (nvfp4.RECIPROCAL, COMPRESSED, (48, 32)),
        (nvfp4.RECIPROCAL, {**COMPRESSED, "p.weight_global_scale": Stored("F32", ())}, (48, 32)),
    ],
)
def test_a_fitting_weight_has_no_problems(fmt, infos, shape):
    assert fmt.problems("p", shape, infos) == []


def test_every_problem_is_named_at_once():
    infos = {
        "p.lattice": Stored("I16", (2, 4, 32)),
        "p.left": Stored("F32", (32,)),
        "p.flag": Stored("I32", (1,)),
    }
    assert EXOTIC.problems("p", (50, 32), infos) == [
        "p: shape [50, 32] is not a multiple of [16, 16], as exotic requires",
        "p.lattice: shape [2, 4, 32], expected [2, 3, any]",
        "p.left: dtype F32, expected F16",
        "p.right: missing (part of exotic)",
        "p.flag: shape [1], expected []",
    ]


def test_a_quant_tensor_checks_its_parts():
    good = {"weight": torch.zeros(3, 5).to(torch.float8_e4m3fn), "scale": torch.ones(1, 1)}
    QuantTensor(fp8_block.FORMAT, good, (3, 5))
    for parts, says in [
        ({**good, "more": torch.ones(1)}, "more: not a part"),
        ({"weight": good["weight"]}, "weight_scale_inv: missing"),
        ({**good, "scale": torch.ones(1, 2)}, r"shape \[1, 2\], expected \[1, 1\]"),
        ({**good, "weight": torch.zeros(3, 5)}, "dtype F32, expected F8_E4M3"),
        ({**good, "scale": torch.ones(1, 1, device="meta")}, "different devices"),
    ]:
        with pytest.raises(OpError, match=says):
            QuantTensor(fp8_block.FORMAT, parts, (3, 5))


def test_the_parts_of_a_quant_tensor_cannot_be_exchanged():
    source = {"weight": torch.ones(3, 5)}
    quantized = QuantTensor(bf16.FORMAT, source, (3, 5))
    source["weight"] = torch.zeros(1)
    assert quantized.decode().sum() == 15
    with pytest.raises(TypeError):
        quantized.parts["weight"] = torch.zeros(3, 5)
    moved = quantized.to("meta")
    assert moved.device.type == "meta"
    assert moved.shape == (3, 5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_plain_weights_decode_exactly(dtype):
    weight = torch.randn(3, 5).to(dtype)
    decoded = QuantTensor(bf16.FORMAT, {"weight": weight}, (3, 5)).decode()
    assert decoded.dtype == torch.float32
    assert torch.equal(decoded, weight.float())


def test_plain_weights_are_encoded_to_bf16():
    weight = torch.tensor([[1.0, 1 + 2**-9], [1 + 2**-8, 3.0]])
    quantized = bf16.FORMAT.quantize(weight)
    assert quantized.parts["weight"].dtype == torch.bfloat16
    assert quantized.decode().tolist() == [[1.0, 1.0], [1.0, 3.0]]
    assert bf16.FORMAT.is_plain
    assert not fp8_block.FORMAT.is_plain


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(2, 2, dtype=torch.int32)])
def test_only_float_matrices_are_encoded(weight):
    for fmt in FORMATS:
        with pytest.raises(OpError, match="floating-point"):
            fmt.quantize(weight)


def test_dtype_tags_agree_with_the_file_format():
    assert TORCH_DTYPES.keys() <= DTYPE_BITS.keys()
    for tag, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize * 8 == DTYPE_BITS[tag]
        assert DTYPE_TAGS[dtype] == tag
    assert {tag for tag in DTYPE_BITS if tag not in TORCH_DTYPES} == {"F4", "F6_E2M3", "F6_E3M2"}
