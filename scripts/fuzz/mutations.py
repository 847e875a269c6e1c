"""Seeded damage of a file's bytes."""

import random

_TEXTS = (
    b"NaN", b"-1", b"1e999", b"null", b"true", b"[]", b"{}", b'"', b"9" * 400, b"0.5",
    b"18446744073709551615", b"-9223372036854775808", b"\n", b"\t", b",", b"*a", b"&a ",
    b"../", b"\xff\xfe", b"\x00",
)  # fmt: skip


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Return the content with a change, sometimes two or four: bits, bytes, runs, cuts, numbers,
    texts."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not data:
            break
        at = rng.randrange(len(data))
        size = rng.choice((1, 2, 4, 8, rng.randint(1, 64)))
        match rng.randrange(9):
            case 0:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at] = rng.randrange(256)
            case 2:
                data[at : at + size] = bytes(rng.choice((0, 255, 127, 128)) for _ in range(size))
            case 3:
                del data[at:]
            case 4:
                del data[at : at + size]
            case 5:
                other = rng.randrange(len(data))
                data[at:at] = data[other : other + size]
            case 6:
                number = rng.choice((0, 1, -1, 2**31 - 1, 2**31, 2**63 - 1, -(2**63), 2**40, 10**9))
                wide = rng.choice((4, 8))
                mask = (1 << 8 * wide) - 1
                data[at : at + wide] = (number & mask).to_bytes(wide, rng.choice(("little", "big")))
            case 7:
                data[at:at] = rng.choice(_TEXTS)
            case _:
                text = rng.choice(_TEXTS)
                data[at : at + len(text)] = text
    return bytes(data)
