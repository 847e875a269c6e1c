"""Prune FBGEMM's CUDA libraries in place.

The machine code of one architecture stays, for the kernels that TorchRec's training and gpu_check
launch. The rest becomes zeros, which sparse archives skip. File sizes, addresses and symbols stay;
launching a dropped kernel fails with "no kernel image". nvprune cannot prune these libraries: it
takes relocatable objects only.
"""

import mmap
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# The magic number and the header of a fat binary are those of CUDA's fatbinary.h. NVIDIA does not
# document an entry's header: kind (2 is ELF), header size, size, 12 bytes later the architecture.
MAGIC, ELF = 0xBA55ED50, 2
FAT_HEADER, ENTRY_HEADER = "<IHHQ", "<H2xIQ12xI"
ENTRY_BYTES = 64  # of an entry's header, at least
SECTION_HEADER = "<IIQQQQIIQQ"  # Elf64_Shdr
ZSTANDARD = b"\x28\xb5\x2f\xfd"
OPTIMIZERS = "rowwise_adagrad|adagrad|sgd|adam|partial_rowwise_adam"  # OPER's
# Patterns of the kernels that each library keeps; other libraries lose all kernels. A fat binary
# without kernels, or with CUB's alone, is kept.
KEPT = {
    "fbgemm_gpu_tbe_training_backward": (
        rf"split_embedding(_nobag)?_backward_codegen_({OPTIMIZERS})_(un)?weighted_kernel"
        r"|split_embedding_codegen_grad_indice_weights|embedding_ops16grad_mean"
    ),
    "fbgemm_gpu_tbe_training_forward": (
        r"split_embedding(_nobag)?_codegen_forward_(un)?weighted(_small)?_kernel"
    ),
    "fbgemm_gpu_py": r"^(?!.*faster_hash).*",
    "fbgemm_gpu_tbe_index_select": ".*",
    "fbgemm_gpu_tbe_cache": ".*",
    "fbgemm_gpu_tbe_common": ".*",
    "fbgemm_gpu_tbe_utils": ".*",
    "fbgemm_gpu_sparse_async_cumsum": ".*",
    "fbgemm_gpu_embedding_inplace_ops": ".*",
}
NO_KERNEL = r"(?!)"
# Instances of templates whose code is dropped from images that are kept: rows of eight bits.
CODE_DROPPED = re.compile(r"Float8_e4m3fn")


class Section(NamedTuple):
    """A section of an ELF file: its name, and the offset and number of its bytes."""

    name: str
    at: int
    size: int


class Entry(NamedTuple):
    """One image of a fat binary: its kind, its architecture, and its offset and sizes in bytes."""

    kind: int
    architecture: int
    at: int
    header_size: int
    size: int


class FatBinary(NamedTuple):
    """Images of one source file for several architectures."""

    at: int
    header_size: int
    size: int
    entries: tuple[Entry, ...]


def prune_all(folder: Path, architecture: int) -> None:
    """Prune every CUDA library in a folder, and print the bytes of each before and after."""
    for library in sorted(folder.glob("*.so")):
        if any(section.name == ".nv_fatbin" for section in sections(library.read_bytes())):
            before, after = prune(library, architecture)
            print(f"bundle: {library.name}: {before:,} bytes of device code, now {after:,}")


def prune(library: Path, architecture: int) -> tuple[int, int]:
    """Prune a library; return its bytes of device code before and after."""
    kept_names = re.compile(KEPT.get(library.stem, NO_KERNEL))
    before = after = 0
    with open(library, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        for fat in list(fat_binaries(data)):
            images = [
                image
                for entry in fat.entries
                if (entry.kind, entry.architecture) == (ELF, architecture)
                if (image := kept_image(data, entry, kept_names)) is not None
            ]
            body = b"".join(images)
            place = fat.at + fat.header_size
            data[place : place + fat.size] = body.ljust(fat.size, b"\0")
            header = struct.pack(FAT_HEADER, MAGIC, 1, fat.header_size, len(body))
            data[fat.at : fat.at + len(header)] = header
            before, after = before + fat.size, after + len(body)
        data.flush()
    return before, after


def kept_image(data: mmap.mmap, entry: Entry, kept_names: "re.Pattern[str]") -> bytes | None:
    """Return an image with its header, less the code of dropped instances; None if no kernel of it
    is kept."""
    middle = entry.at + entry.header_size
    header, body = data[entry.at : middle], data[middle : middle + entry.size]
    image = decompressed(body)
    names = [s.name[6:] for s in sections(image) if s.name.startswith(".text.")]
    names = [name for name in names if "EmptyKernel" not in name]
    if names and not any(map(kept_names.search, names)):
        return None
    if image is body:  # an image that is compressed keeps its size
        changed = bytearray(body)
        for section in sections(body):
            if section.name.startswith(".text.") and CODE_DROPPED.search(section.name):
                changed[section.at : section.at + section.size] = bytes(section.size)
        body = bytes(changed)
    return header + body


def fat_binaries(data: mmap.mmap) -> Iterator[FatBinary]:
    """Yield the fat binaries of a library."""
    for section in sections(data):
        if section.name != ".nv_fatbin":
            continue
        at, end = section.at, section.at + section.size
        while at + struct.calcsize(FAT_HEADER) <= end:
            magic, _, header_size, size = struct.unpack_from(FAT_HEADER, data, at)
            if magic != MAGIC:
                at += 8
                continue
            entries, place = [], at + header_size
            while place + ENTRY_BYTES <= at + header_size + size:
                kind, entry_header_size, payload, architecture = struct.unpack_from(
                    ENTRY_HEADER, data, place
                )
                entries.append(Entry(kind, architecture, place, entry_header_size, payload))
                place += entry_header_size + payload
            yield FatBinary(at, header_size, size, tuple(entries))
            at += header_size + size


def sections(data: bytes | mmap.mmap) -> list[Section]:
    """Return the sections of an ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)  # e_shoff of Elf64_Ehdr
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)  # e_shentsize and the next two
    headers = [struct.unpack_from(SECTION_HEADER, data, table + n * size) for n in range(count)]
    found_sections = []
    for name, _, _, _, at, length, *_ in headers:
        begin = headers[names][4] + name
        text = bytes(data[begin : data.find(b"\0", begin)]).decode()
        found_sections.append(Section(text, at, length))
    return found_sections


def decompressed(payload: bytes) -> bytes:
    if not payload.startswith(ZSTANDARD):
        return payload
    import zstandard

    return bytes(zstandard.ZstdDecompressor().decompressobj().decompress(payload))
