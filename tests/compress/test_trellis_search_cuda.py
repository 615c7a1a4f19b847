"""The trellis search on a GPU: equal to the plain one, for every rate and codebook.

Without a GPU: it compiles for the machines in mind, and refuses what it cannot take.
"""

import pytest
import torch

from emberbox.compress import trellis_search_numpy
from emberbox.compress.trellis_search_cuda import Shape, search
from emberbox.errors import EnvironmentProblem, OpError
from emberbox.formats.trellis import RATES, is_half_rate
from emberbox.ops.build import build, nvrtc_version

CASES = [
    (num_words, book)
    for num_words in RATES
    for book in ("mul1", "mcg", "3inst")
    if book == "mul1" or not is_half_rate(num_words)
]


def tiles_of(count, seed):
    """Gaussian tiles; the last two hold large values, and ties."""
    generator = torch.Generator().manual_seed(seed)
    tiles = torch.randn(count, 16, 16, generator=generator)
    tiles[-1] *= 8
    tiles[-2] = tiles[-2].round()
    return tiles


@pytest.mark.gpu
@pytest.mark.parametrize(("num_words", "book"), CASES)
def test_windows_and_costs_are_those_of_the_plain_search(num_words, book):
    tiles = tiles_of(3, seed=num_words)
    expected = trellis_search_numpy.search(tiles, num_words, book)
    found = search(tiles.cuda(), num_words, book)
    assert torch.equal(found.windows.cpu(), expected.windows)
    assert torch.equal(found.cost.cpu(), expected.cost)


@pytest.mark.gpu
@pytest.mark.parametrize("num_words", [16, 32, 40, 56, 64])
def test_a_tile_gives_the_same_alone_and_among_thousands(num_words):
    tiles = tiles_of(7, seed=1).cuda()
    many = search(tiles.repeat(301, 1, 1), num_words, "mul1")
    for i in range(len(tiles)):
        alone = search(tiles[i : i + 1], num_words, "mul1")
        assert (many.windows.view(301, 7, 256)[:, i] == alone.windows).all()
        assert (many.cost.view(301, 7)[:, i] == alone.cost).all()


@pytest.mark.gpu
def test_no_tiles_and_bad_tiles():
    assert search(torch.zeros(0, 16, 16).cuda(), 32, "mul1").windows.shape == (0, 256)
    with pytest.raises(OpError, match="not finite"):
        search(torch.full((1, 16, 16), torch.nan).cuda(), 32, "mul1")


def test_tiles_on_the_cpu_are_refused():
    with pytest.raises(OpError, match="tiles on cpu, expected a CUDA device"):
        search(torch.zeros(1, 16, 16), 32, "mul1")


@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
@pytest.mark.parametrize("num_words", RATES)
def test_a_block_fits_the_shared_memory_of_its_architecture(num_words, arch):
    shape = Shape.choose(*RATES[num_words], arch)
    assert shape.shared_bytes <= {"sm_90": 227, "sm_121": 99}[arch] * 1024
    assert shape.scratch_bytes <= 2 * 1024**2


@pytest.mark.parametrize("arch", ["sm_90", "sm_121"])
@pytest.mark.parametrize("num_words", RATES)
def test_it_compiles_without_a_gpu(num_words, arch, tmp_path):
    try:
        nvrtc_version()
        cubin = build(Shape.choose(*RATES[num_words], arch).source(), arch, tmp_path)
    except EnvironmentProblem as missing:
        pytest.skip(f"NVRTC or its headers are not installed: {missing.message}")
    # The checks in the source hold: it reckons shared and scratch memory as Shape does.
    assert cubin.read_bytes()[:4] == b"\x7fELF"
