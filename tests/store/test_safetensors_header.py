"""Headers: valid ones load as the safetensors library loads them, mutated ones never surprise."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from emberbox.errors import HeaderError
from emberbox.store.safetensors_header import TensorInfo, num_data_bytes, read_header

QUICK = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
VALID = save(
    {
        "a.weight": np.arange(15, dtype=np.float32).reshape(3, 5),
        "b": np.array(7, dtype=np.int64),
        "empty": np.zeros((0, 4), dtype=np.float16),
        "c.weight": np.arange(7, dtype=np.uint8),
    },
    metadata={"format": "np"},
)
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")


def test_every_tensor_is_found_where_the_library_put_it(tmp_path):
    path = tmp_path / "valid.safetensors"
    path.write_bytes(VALID)
    infos = read_header(path)
    assert {name: (info.dtype, info.shape) for name, info in infos.items()} == {
        "a.weight": ("F32", (3, 5)),
        "b": ("I64", ()),
        "empty": ("F16", (0, 4)),
        "c.weight": ("U8", (7,)),
    }
    a = infos["a.weight"]
    assert a.file == path
    assert np.frombuffer(VALID[a.start : a.stop], np.float32).tolist() == list(range(15))
    assert infos["empty"].num_bytes == 0
    assert max(info.stop for info in infos.values()) == len(VALID)


def test_a_file_without_tensors_or_metadata_is_valid(tmp_path):
    path = tmp_path / "none.safetensors"
    path.write_bytes((4).to_bytes(8, "little") + b"{}  ")
    assert read_header(path) == {}


def test_a_missing_file_is_a_header_error_that_names_it(tmp_path):
    with pytest.raises(HeaderError, match=r"gone\.safetensors: cannot be read"):
        read_header(tmp_path / "gone.safetensors")


def test_tensor_info_is_frozen():
    info = TensorInfo("x", "U8", (3,), None, 10, 13)
    assert info.num_bytes == 3
    with pytest.raises(AttributeError):
        info.start = 0


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F32", (), 4),
        ("BF16", (3, 5), 30),
        ("F4", (4,), 2),
        ("F4", (3,), None),
        ("F6_E2M3", (4,), 3),
        ("F6_E3M2", (2,), None),
        ("U8", (2**62, 2), None),
        ("U8", (2**62, 2**62, 0), 0),
        ("C64", (3,), 24),
    ],
)
def test_bytes_of_a_shape(dtype, shape, expected):
    assert num_data_bytes(dtype, shape) == expected


@QUICK
@given(
    st.lists(
        st.tuples(
            st.integers(0, HEADER_END + 8),
            st.sampled_from(["set", "insert", "delete", "repeat"]),
            st.one_of(st.integers(0, 255), st.sampled_from(b'{}[]",:0129-.e\\utfn ')),
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_a_mutated_header_loads_or_is_a_header_error(tmp_path, mutations, fix_length):
    mutated = bytearray(VALID)
    for position, kind, value in mutations:
        if kind == "set":
            mutated[position] = value
        elif kind == "insert":
            mutated[position:position] = bytes([value])
        elif kind == "delete":
            del mutated[position : position + 1 + value % 5]
        else:
            mutated[position:position] = mutated[position : position + value]
    if fix_length:
        grown = HEADER_END - 8 + len(mutated) - len(VALID)
        mutated[:8] = max(grown, 0).to_bytes(8, "little")
    _loads_like_the_library_or_refuses(tmp_path / "mutated.safetensors", bytes(mutated))


NUMBERS = st.one_of(
    st.integers(-2, 70),
    st.sampled_from([2**31, 2**32, 2**61, 2**63, 2**64, 2**200]),
    st.booleans(),
    st.none(),
    st.floats(allow_nan=False),
)
LAYOUTS = st.lists(
    st.tuples(
        st.text(max_size=3),
        st.sampled_from(["U8", "F32", "BF16", "F4", "F8_E4M3", "C64"]),
        st.lists(st.integers(0, 4), max_size=3),
    ),
    max_size=4,
    unique_by=lambda tensor: tensor[0],
)
CHANGES = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.sampled_from(["dtype", "shape", "data_offsets", "order", "more"]),
        NUMBERS | st.sampled_from(["I65", "F64"]),
    ),
    max_size=2,
)


@QUICK
@given(LAYOUTS, CHANGES, st.sampled_from([0, 0, 0, -1, 1]))
def test_a_changed_layout_loads_or_is_a_header_error(tmp_path, layout, changes, num_extra_bytes):
    entries, stop = {}, 0
    for name, dtype, shape in layout:
        start, stop = stop, stop + (num_data_bytes(dtype, tuple(shape)) or 0)
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    names = sorted(entries)
    for which, key, value in changes:
        if which >= len(names):
            continue
        entry = entries[names[which]]
        if key in ("dtype", "more"):
            entry[key] = value
        elif key == "order":
            entries[names[which]] = entries.pop(names[which])
        elif isinstance(entry[key], list) and entry[key]:
            entry[key][which % len(entry[key])] = value
    raw = json.dumps(entries).encode()
    content = len(raw).to_bytes(8, "little") + raw + bytes(max(stop + num_extra_bytes, 0))
    _loads_like_the_library_or_refuses(tmp_path / "changed.safetensors", content)


@QUICK
@given(st.binary(max_size=64))
def test_any_bytes_load_or_are_a_header_error(tmp_path, content):
    path = tmp_path / "header.safetensors"
    _loads_like_the_library_or_refuses(path, len(content).to_bytes(8, "little") + content)
    _loads_like_the_library_or_refuses(tmp_path / "bytes.safetensors", content)


def _loads_like_the_library_or_refuses(path, content):
    """What we accept the library accepts too, with the same dtypes, shapes and offsets."""
    path.write_bytes(content)
    tracemalloc.start()
    try:
        infos = read_header(path)
    except HeaderError as error:
        assert str(path) in str(error)
        return
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 200_000 + 40 * len(content)
    with safe_open(path, "numpy") as library:
        assert set(library.keys()) == set(infos)
        for name, info in infos.items():
            part = library.get_slice(name)
            assert (part.get_dtype(), tuple(part.get_shape())) == (info.dtype, info.shape)


def test_the_comparison_with_the_library_can_fail(tmp_path):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(VALID[:-1])
    with pytest.raises(SafetensorError), safe_open(path, "numpy"):
        pass
