"""EXL3: trellis, rotations and parts; what is refused; a weight decoded by hand."""

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from emberbox.errors import OpError
from emberbox.formats import exl3
from emberbox.formats.base import QuantTensor
from emberbox.formats.codebooks import CODEBOOKS
from emberbox.formats.table import detect
from emberbox.formats.trellis import RATES, decode_tiles, element_order, pack, unpack
from tests.helpers.stored import Stored

MARK = torch.tensor(0, dtype=torch.int32)


def random_tiles(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**15), 2**15, shape, generator=generator).to(torch.int16)


def parts_of(shape, num_words=32, seed=0, **more):
    """Stored parts of a random weight (out, in), sides padded as files pad them."""
    outputs, inputs = (-(-size // 128) * 128 for size in shape)
    generator = torch.Generator().manual_seed(seed)
    return {
        "trellis": random_tiles(seed, inputs // 16, outputs // 16, num_words),
        "suh": torch.randn(inputs, generator=generator).half(),
        "svh": torch.randn(outputs, generator=generator).half(),
        "mul1": MARK,
        **more,
    }


def hadamard(size):
    """Sylvester's matrix, entry by entry: the sign is the parity of the common bits."""
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    return torch.tensor(signs, dtype=torch.float64) / size**0.5


# -- the trellis ---------------------------------------------------------------------------------


def ring_windows(packed, num_words):
    """The windows of one tile, from a string of bits."""
    words = [int(word) & 0xFFFF for word in packed]
    ring = "".join(f"{words[i + 1]:016b}{words[i]:016b}" for i in range(0, num_words, 2))
    even, odd = RATES[num_words]
    end, windows = 0, []
    for position in range(256):
        end += odd if position % 2 else even
        windows.append(int((ring + ring)[len(ring) + end - 16 : len(ring) + end], 2))
    assert end == len(ring) == 16 * num_words
    return windows


@pytest.mark.parametrize("num_words", sorted(RATES))
def test_a_window_is_the_sixteen_bits_that_end_with_its_own(num_words):
    packed = random_tiles(num_words, num_words)
    assert unpack(packed).tolist() == ring_windows(packed, num_words)


@given(st.sampled_from(sorted(RATES)), st.data())
def test_packing_the_windows_of_any_bytes_gives_the_bytes_back(num_words, data):
    raw = data.draw(st.binary(min_size=4 * num_words, max_size=4 * num_words))
    packed = torch.frombuffer(bytearray(raw), dtype=torch.int16).view(2, num_words)
    assert torch.equal(pack(unpack(packed), num_words), packed)


@given(st.sampled_from(sorted(RATES)), st.sampled_from(sorted(CODEBOOKS)), st.data())
def test_any_bytes_decode_to_finite_values(num_words, name, data):
    raw = data.draw(st.binary(min_size=2 * num_words, max_size=2 * num_words))
    packed = torch.frombuffer(bytearray(raw), dtype=torch.int16)
    tile = decode_tiles(packed, CODEBOOKS[name])
    assert tile.shape == (16, 16)
    assert tile.isfinite().all()
    assert tile.abs().max() < 4


@pytest.mark.parametrize("position", [0, 100, 255])
def test_windows_that_do_not_continue_each_other_are_not_packed(position):
    windows = unpack(random_tiles(1, 32))
    windows[position] ^= 0x0100
    with pytest.raises(OpError, match="not a closed path"):
        pack(windows, 32)


@pytest.mark.parametrize("num_words", [0, 8, 72, 130])
def test_other_rates_are_refused(num_words):
    with pytest.raises(OpError, match=f"tiles of {num_words} words"):
        pack(torch.zeros(256, dtype=torch.int32), num_words)
    if num_words % 2 == 0 and num_words:
        with pytest.raises(OpError, match=f"tiles of {num_words} words"):
            unpack(torch.zeros(num_words, dtype=torch.int16))


def test_first_positions_are_the_elements_that_the_page_lists():
    order = element_order().view(16, 16)
    assert order.flatten().sort().values.tolist() == list(range(256))
    first = [(0, 0), (1, 0), (8, 0), (9, 0), (0, 8), (1, 8), (8, 8), (9, 8), (2, 0), (3, 0)]
    assert [int(order[element]) for element in first] == list(range(10))


def test_the_worked_example_of_the_page_on_formats():
    words = torch.tensor([0x1357 + 0x0801 * n for n in range(32)], dtype=torch.int32)
    packed = words.to(torch.int16)
    windows = unpack(packed)
    assert [f"{int(w):04X}" for w in windows[:5]] == ["0DD4", "3751", "DD46", "751B", "D46D"]
    assert f"{int(windows[255]):04X}" == "0375"
    row = decode_tiles(packed, CODEBOOKS["mul1"])[0, :8].view(torch.int16)
    expected = ["B882", "B890", "3A89", "B1B0", "B821", "BE0B", "AFEA", "38DC"]
    assert [f"{int(v) & 0xFFFF:04X}" for v in row] == expected


# -- the rotations -------------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
def test_rotating_twice_changes_nothing_and_rotating_keeps_norms(rows, blocks, seed):
    x = torch.randn(rows, 128 * blocks, generator=torch.Generator().manual_seed(seed)).double()
    rotated = exl3.rotate(x)
    assert torch.allclose(exl3.rotate(rotated), x, rtol=0, atol=1e-13)
    per_block = rotated.view(rows, blocks, 128).norm(dim=-1)
    assert torch.allclose(per_block, x.view(rows, blocks, 128).norm(dim=-1), rtol=1e-13)


def test_the_rotation_is_the_hadamard_matrix_in_natural_order():
    expected = torch.block_diag(hadamard(128), hadamard(128))
    assert torch.allclose(exl3.rotate(torch.eye(256).double()), expected, atol=1e-15)


# -- a weight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_words", [16, 40, 128])
@pytest.mark.parametrize("shape", [(128, 128), (384, 256), (130, 257), (40, 24)], ids=str)
def test_a_weight_is_the_product_of_its_five_factors(shape, num_words):
    parts = parts_of(shape, num_words, seed=num_words)
    weight = QuantTensor(exl3.FORMAT, parts, shape).decode()
    assert weight.shape == shape
    assert weight.is_contiguous()
    tiles = decode_tiles(parts["trellis"], CODEBOOKS["mul1"]).double()
    q = torch.cat([torch.cat(list(row), dim=1) for row in tiles])  # [in, out]
    left, right = (torch.block_diag(*[hadamard(128)] * (size // 128)) for size in q.shape)
    full = parts["suh"].double().diag() @ left @ q @ right @ parts["svh"].double().diag()
    expected = full.T[: shape[0], : shape[1]]
    assert (weight - expected).abs().max() <= 2e-6 * expected.abs().max()


def test_old_sign_words_are_scales_of_one():
    shape = (256, 384)
    parts = parts_of(shape)
    sign_words = {"su": random_tiles(5, 24), "sv": random_tiles(6, 16)}
    scales = {
        f"{old}h": torch.tensor(
            [-1.0 if int(word) >> bit & 1 else 1.0 for word in words for bit in range(16)]
        ).half()
        for old, words in sign_words.items()
    }
    plain = {"trellis": parts["trellis"], "mul1": MARK}
    old = QuantTensor(exl3.FORMAT, plain | sign_words, shape).decode()
    assert torch.equal(old, QuantTensor(exl3.FORMAT, plain | scales, shape).decode())
    mixed = plain | {"suh": scales["suh"], "sv": sign_words["sv"]}
    assert torch.equal(old, QuantTensor(exl3.FORMAT, mixed, shape).decode())


@pytest.mark.parametrize("marker", ["3inst", "mcg", "mul1"])
def test_the_marker_chooses_the_codebook_and_its_value_does_not(marker):
    parts = {n: t for n, t in parts_of((128, 128)).items() if n != "mul1"}
    if marker != "3inst":
        parts[marker] = torch.tensor(-1, dtype=torch.int32)
    expected = decode_tiles(parts["trellis"], CODEBOOKS[marker])
    tile = exl3.inner(QuantTensor(exl3.FORMAT, parts, (128, 128)).parts)[16:32, 32:48]
    assert torch.equal(tile, expected[1, 2])


def test_the_obsolete_scale_is_read_and_ignored():
    parts = parts_of((128, 128))
    scaled = QuantTensor(exl3.FORMAT, parts | {"scale": torch.tensor(7.0)}, (128, 128))
    assert torch.equal(scaled.decode(), exl3.decode(parts, (128, 128)))


def test_a_matrix_of_the_small_model_decodes_in_milliseconds():
    weight = QuantTensor(exl3.FORMAT, parts_of((128, 128), 64), (128, 128))
    weight.decode()
    start = time.process_time()
    for _ in range(10):
        weight.decode()
    assert (time.process_time() - start) / 10 < 0.02  # measured 1.5 ms


def test_bytes_are_those_of_published_files():
    num_bytes = 0
    for out, inp in ((2048, 4096), (2048, 4096), (4096, 2048)):
        shapes = exl3.part_shapes((out, inp))
        num_bytes += 2 * shapes["trellis"][0] * shapes["trellis"][1] * 32
        num_bytes += 2 * (shapes["suh"][0] + shapes["svh"][0]) + 4
    assert num_bytes == 6_328_332


def test_a_weight_alone_is_not_encoded():
    with pytest.raises(OpError, match="not enough"):
        exl3.FORMAT.quantize(torch.ones(128, 128))


# -- parts that do not belong together -----------------------------------------------------------

GOOD = {
    "p.trellis": Stored("I16", (16, 24, 32)),
    "p.suh": Stored("F16", (256,)),
    "p.svh": Stored("F16", (384,)),
    "p.mul1": Stored("I32", ()),
}


def without(*names, **more):
    kept = {name: info for name, info in GOOD.items() if name not in names}
    return kept | {f"p.{name}": info for name, info in more.items()}


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        (without("p.svh"), ["p.svh: missing (part of exl3)"]),
        (without("p.suh"), ["p.suh: missing (part of exl3)"]),
        (without(su=Stored("I16", (16,))), ["p.su: stored beside .suh"]),
        (
            without(mcg=Stored("I32", ())),
            ["p.mcg: stored beside .mul1, a weight has one codebook"],
        ),
        (
            without(trellis=Stored("I16", (16, 24, 72))),
            [
                "p.trellis: tiles of 72 words, expected 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, "
                "128 (16 for each bit of a weight)"
            ],
        ),
        (
            without("p.mul1", trellis=Stored("I16", (16, 24, 40))),
            ["p.trellis: tiles of 40 words, a half rate, without the marker .mul1"],
        ),
        (
            without(trellis=Stored("I16", (24, 16, 32))),
            ["p.trellis: shape [24, 16, 32], expected [16, 24, any]"],
        ),
        (without(suh=Stored("BF16", (256,))), ["p.suh: dtype BF16, expected F16"]),
        (without(mul1=Stored("I32", (1,))), ["p.mul1: shape [1], expected []"]),
        (without("p.suh", su=Stored("I16", (16,))), []),
        (without("p.mul1"), []),
        (GOOD, []),
    ],
)
def test_every_reason_names_a_tensor(infos, expected):
    assert detect("p", infos) is exl3.FORMAT
    assert exl3.FORMAT.problems("p", (384, 256), infos) == expected


def test_a_trellis_without_any_scale_is_named_in_full():
    infos = {"p.trellis": Stored("I16", ())}
    problems = exl3.FORMAT.problems("p", (384, 256), infos)
    assert [problem.split(":")[0] for problem in problems] == [
        "p.trellis",
        "p.suh",
        "p.svh",
        "p.trellis",
    ]
