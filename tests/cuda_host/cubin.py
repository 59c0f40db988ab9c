"""Registers, stack frame and shared memory of each kernel, read out of a cubin (an ELF file) without CUDA's tools."""

from __future__ import annotations

import struct
from dataclasses import dataclass

# Kinds of entry in the section .nv.info; the value is (symbol index, number).
_FRAME_SIZE, _REGISTERS = 0x11, 0x2F
_SIZED = 4  # an entry whose payload's size follows


@dataclass(frozen=True)
class Usage:
    """What one thread or block of a kernel takes.

    Attributes:
        registers: 32-bit registers of a thread.
        frame_bytes: local memory of a thread: spilled registers, or arrays that are not in registers.
        shared_bytes: static shared memory of a block.
    """

    registers: int
    frame_bytes: int
    shared_bytes: int


def kernels(cubin: bytes) -> dict[str, Usage]:
    """Usage by lowered (mangled) name.

    Raises:
        ValueError: not a 64-bit little-endian ELF file, or without the sections of a cubin.
    """
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (section_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = []
    for i in range(count):
        name, kind, _, _, offset, size = struct.unpack_from("<IIQQQQ", cubin, section_offset + i * entry_size)
        # Sections of kind 8 take no room in the file: shared memory is one.
        sections.append((name, kind, offset, size))
    names_at = sections[names_index][2]
    by_name = {_text(cubin, names_at + name): (offset, size) for name, _, offset, size in sections}

    symbols_at, symbols_size = by_name[".symtab"]
    strings_at, _ = by_name[".strtab"]
    symbols = [
        _text(cubin, strings_at + struct.unpack_from("<I", cubin, at)[0])
        for at in range(symbols_at, symbols_at + symbols_size, 24)
    ]
    numbers: dict[tuple[int, str], int] = {}
    at, size = by_name[".nv.info"]
    end = at + size
    while at < end:
        form, kind, value = struct.unpack_from("<BBH", cubin, at)
        at += 4
        if form != _SIZED:
            continue
        if kind in (_FRAME_SIZE, _REGISTERS):
            symbol, number = struct.unpack_from("<II", cubin, at)
            numbers[kind, symbols[symbol]] = number
        at += value
    found = {}
    for section in by_name:
        if section.startswith(".text."):
            kernel = section.removeprefix(".text.")
            shared = by_name.get(f".nv.shared.{kernel}", (0, 0))[1]
            found[kernel] = Usage(numbers[_REGISTERS, kernel], numbers[_FRAME_SIZE, kernel], shared)
    return found


def _text(cubin: bytes, at: int) -> str:
    return cubin[at : cubin.index(b"\0", at)].decode()
