"""What a compiled kernel needs of a multiprocessor, read from its cubin.

A cubin is an ELF file of 64 bits. Each kernel NAME has a section .text.NAME, perhaps one
.nv.shared.NAME, and attributes in .nv.info: stack and, in newer files, registers, whose number
older ones hold in the top byte of .text.NAME's info field. Knows no kernel and no device.
"""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from emberbox.errors import OpError

ELF = b"\x7fELF\x02\x01"  # 64 bits, little-endian
HEADER = struct.Struct("<16x2xH20xQ10x3H")  # machine; offset, size, count of sections, names
SECTION = struct.Struct("<2I4Q2I2Q")  # name, type, flags, address, offset, size, link, info, ...
SYMBOL = struct.Struct("<I2xH16x")  # name, section
CUDA = 190
# Attributes in .nv.info: a form and a number of one byte each, then a size, then (symbol, value).
SIZED, FRAME_SIZE, MIN_STACK_SIZE, REGISTERS = 4, 0x11, 0x12, 0x2F
PER_SYMBOL = struct.Struct("<2I")


@dataclass(frozen=True, slots=True)
class Resources:
    """Registers of a thread; bytes of static shared memory of a block and of stack of a thread.

    Shared memory includes what the architecture reserves of it for the system (1 KiB from sm_90 on)
    where the compiler counts it. Registers that did not fit are kept on the stack.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    data: bytes
    size: int
    info: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """Of each kernel by name. Raises OpError where the bytes are not a cubin."""
    sections = list(_sections(cubin))
    registers = _largest(sections, REGISTERS)
    stacks = _largest(sections, FRAME_SIZE, MIN_STACK_SIZE)
    shared = {section.name: section.size for section in sections}
    return {
        name: Resources(
            registers=registers.get(name, section.info >> 24),
            shared_bytes=shared.get(f".nv.shared.{name}", 0),
            stack_bytes=stacks.get(name, 0),
        )
        for section in sections
        if (name := section.name.removeprefix(".text.")) != section.name
    }


def machine_code(cubin: bytes) -> dict[str, bytes]:
    """The instructions of each kernel by name."""
    return {
        section.name.removeprefix(".text."): section.data
        for section in _sections(cubin)
        if section.name.startswith(".text.")
    }


def _sections(cubin: bytes) -> Iterator[_Section]:
    try:
        machine, start, size, count, names_at = HEADER.unpack_from(cubin)
        if not cubin.startswith(ELF) or machine != CUDA or size != SECTION.size:
            raise OpError("not a cubin: expected an ELF file of 64 bits for CUDA")
        heads = [SECTION.unpack_from(cubin, start + i * size) for i in range(count)]
    except struct.error as short:
        raise OpError(f"not a cubin: {len(cubin)} bytes are not enough") from short
    names = cubin[heads[names_at][4] :]
    for name, kind, _, _, offset, length, _, info, _, _ in heads:
        yield _Section(_text(names, name), kind, cubin[offset : offset + length], length, info)


def _text(names: bytes, start: int) -> str:
    return names[start : names.index(b"\0", start)].decode()


def _largest(sections: list[_Section], *numbers: int) -> Mapping[str, int]:
    """The largest value of the attributes of these numbers, by kernel."""
    held = {section.name: section for section in sections}
    if ".nv.info" not in held:
        return {}
    found: dict[str, int] = {}
    symbols, names = held[".symtab"].data, held[".strtab"].data
    for number, symbol, value in _attributes(held[".nv.info"].data):
        if number in numbers:
            name, _ = SYMBOL.unpack_from(symbols, symbol * SYMBOL.size)
            found[_text(names, name)] = max(found.get(_text(names, name), 0), value)
    return found


def _attributes(data: bytes) -> Iterator[tuple[int, int, int]]:
    """(number, symbol, value) of attributes of that form."""
    at = 0
    while at + 4 <= len(data):
        form, number, size = struct.unpack_from("<2BH", data, at)
        at += 4
        if form == SIZED:
            if size == PER_SYMBOL.size:
                yield (number, *PER_SYMBOL.unpack_from(data, at))
            at += size
