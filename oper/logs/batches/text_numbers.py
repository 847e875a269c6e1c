"""Texts as numbers: decimal and hexadecimal integers, and a stable 64-bit hash of any text.

A text that is a decimal integer of at most 63 bits, optionally signed, is read as that integer,
whatever the type of its column, so that a log has the same rows as CSV and as Parquet. The rule
`hash` hashes every other text by

    h = fmix64(length · 0x9E3779B97F4A7C15);   for each 8-byte word w:   h = fmix64(h ⊕ w)

over its UTF-8 bytes as little-endian words, the last one filled with zeros; fmix64 is the 64-bit
finaliser of MurmurHash3 (Appleby, public domain).
"""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from oper.base.arrays import Ints

Words = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MAX_INT64 = "9223372036854775807"
# Digits of hexadecimal characters, 255 elsewhere; 0 for the zero bytes behind a short text.
_HEX = np.full(256, 255, dtype=np.uint8)
_HEX[0] = 0
for _digits, _first in ((b"0123456789", 0), (b"abcdef", 10), (b"ABCDEF", 10)):
    _HEX[np.frombuffer(_digits, np.uint8)] = np.arange(_first, _first + len(_digits))


def decimals(texts: Any) -> tuple[NDArray[np.bool_], Ints]:
    """Return whether each text (`pa.StringArray`, no nulls) is an integer, and the integers.

    bool [n] and int64 [number of true ones].
    """
    plain = all_decimals(texts)
    if plain is not None:
        return np.ones(len(texts), bool), plain
    short = pc.match_substring_regex(texts, "^-?[0-9]{1,18}$")
    long = pc.match_substring_regex(texts, "^-?[0-9]{19}$")
    fits = pc.less_equal(pc.utf8_ltrim(texts, "-"), _MAX_INT64)
    is_integer = pc.or_(short, pc.and_(long, fits))
    return (
        is_integer.to_numpy(zero_copy_only=False),
        texts.filter(is_integer).cast(pa.int64()).to_numpy(),
    )


def all_decimals(texts: Any) -> Ints | None:
    """Return the texts as integers if all are digits of at most 18 characters; else None.

    With None, some texts may still be integers: `decimals` finds them.
    """
    buffer, _, lengths = _bytes_of(texts)
    # Arrow's cast accepts 0x1F as a number, and 19 digits may or may not fit in int64.
    if len(texts) and (lengths.max() > 18 or np.any((buffer | 0x20) == ord("x"))):
        return None
    try:
        return texts.cast(pa.string()).cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid:
        return None


def hexadecimals(texts: Any) -> tuple[NDArray[np.bool_], Ints]:
    """Return whether each text is 1 to 8 hexadecimal digits, and its value (otherwise 0)."""
    buffer, starts, lengths = _bytes_of(texts)
    digits = _HEX[_words(buffer, starts, lengths).view(np.uint8)].view(np.uint64)
    valid = (lengths >= 1) & (lengths <= 8) & (digits & np.uint64(0x8080808080808080) == 0)
    # The first character is the lowest byte and the most significant digit.
    value = digits.byteswap()
    for shift, mask in ((4, 0x00FF00FF00FF00FF), (8, 0x0000FFFF0000FFFF), (16, 0xFFFFFFFF)):
        value = (value | value >> np.uint64(shift)) & np.uint64(mask)
    value >>= (4 * (8 - np.minimum(lengths, 8))).astype(np.uint64)
    return valid, np.where(valid, value, 0).astype(np.int64)


def hash64(texts: Any) -> Words:
    """Return the stable 64-bit hash of each text (`pa.StringArray`, no nulls): uint64 [n]."""
    buffer, starts, lengths = _bytes_of(texts)
    result = _fmix64(lengths.astype(np.uint64) * _GOLDEN)
    active = np.flatnonzero(lengths > 0)
    position = 0
    while len(active):
        words = _words(buffer, starts[active] + position, lengths[active] - position)
        result[active] = _fmix64(result[active] ^ words)
        position += 8
        active = active[lengths[active] > position]
    return result


def _bytes_of(texts: Any) -> tuple[NDArray[np.uint8], Ints, Ints]:
    """Return the UTF-8 bytes of all texts, followed by 8 zeros, and the start and length of
    each."""
    kind = texts.type
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not (wide or pa.types.is_string(kind) or pa.types.is_binary(kind)):
        texts = texts.cast(pa.string())  # The bytes of a view lie scattered.
    _, offsets_buffer, data = texts.buffers()
    if not len(texts):
        return np.zeros(8, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64)
    stored = np.frombuffer(offsets_buffer, np.int64 if wide else np.int32)
    offsets: Ints = stored[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    first, last = int(offsets[0]), int(offsets[-1])
    buffer = np.zeros(last - first + 8, dtype=np.uint8)
    if last > first:
        buffer[:-8] = np.frombuffer(data, np.uint8)[first:last]
    return buffer, offsets[:-1] - first, np.diff(offsets)


def _words(buffer: NDArray[np.uint8], starts: Ints, lengths: Ints) -> Words:
    """Return the little-endian word at each start, zero beyond its text's remaining length."""
    every = np.ndarray((len(buffer) - 7,), dtype="<u8", buffer=buffer.data, strides=(1,))
    excess = (8 * (8 - np.minimum(lengths, 8))).astype(np.uint64)
    return every[starts] & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.minimum(excess, 63))


def _fmix64(h: Words) -> Words:
    h = h ^ h >> np.uint64(33)
    h *= np.uint64(0xFF51AFD7ED558CCD)
    h ^= h >> np.uint64(33)
    h *= np.uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> np.uint64(33)
    return h
