"""Reading the pickle of a checkpoint's index: nothing is run, and memory is bounded by its size.

Reading a pickle calls the functions that it names. So only the names that an index has are
accepted, and each becomes a stand-in that keeps its arguments: no object of torch is made and no
function called. A few bytes of a pickle may also request a place in a table of 16 GB, or a text of
that size. So its instructions are checked first.
"""

import io
import pickle
from io import BufferedReader
from typing import Any

import torch

from oper.base.errors import OperError

_CHECKPOINT = "torch.distributed.checkpoint"
_RECORDS = {
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "Path"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "Path"),  # Python 3.13's name of it
    ("pathlib._local", "PosixPath"),
}

# Instructions of an index, with the bytes of their argument.
_ARGUMENT_BYTES = {
    **dict.fromkeys(b"(.01NR)abdetus]}\x81\x85\x86\x87\x88\x89\x8f\x90\x92\x93\x94lQ", 0),
    **dict.fromkeys(b"Kh\x80", 1),
    **dict.fromkeys(b"M", 2),
    **dict.fromkeys(b"Jj", 4),
    **dict.fromkeys(b"G\x95", 8),
}
# Instructions whose argument begins with its length, with the bytes of that length.
_LENGTH_BYTES = {
    **dict.fromkeys(b"\x8cUC\x8a", 1),
    **dict.fromkeys(b"XTB\x8b", 4),
    **dict.fromkeys(b"\x8d\x8e", 8),
}
_LINES = {**dict.fromkeys(b"ILFSVgP", 1), **dict.fromkeys(b"c", 2)}  # of text
_MEMO_BYTES = {**dict.fromkeys(b"q", 1), **dict.fromkeys(b"r", 4)}  # of a number in the memo
_PUT, _MEMOIZE, _STOP = b"p\x94."


def load_index(file: BufferedReader) -> Any:
    """Return the content of an index, as stand-ins.

    Raise OperError if it names anything else, and any Exception if the pickle is damaged.
    """
    content = file.read()
    _check_instructions(content)
    return _Unpickler(content).load()


def _check_instructions(content: bytes) -> None:
    """Raise ValueError if a pickle has instructions that no index has, an argument beyond its end,
    numbers of its memo that do not follow each other, or a tuple of too many values."""
    at, size, values = 0, len(content), _Values()
    while at < size:
        code = content[at]
        at += 1
        begin = at
        if (fixed := _ARGUMENT_BYTES.get(code)) is not None:
            at += fixed
            if code == _STOP:
                return
        elif (length := _LENGTH_BYTES.get(code)) is not None:
            at += length + int.from_bytes(content[at : at + length], "little")
        elif lines := _LINES.get(code):
            for _ in range(lines):
                at = _line_end(content, at)
        elif code == _PUT:
            at = _line_end(content, at)
        elif code in _MEMO_BYTES:
            at += _MEMO_BYTES[code]
        else:
            raise ValueError(f"it has the instruction {bytes([code])!r}, which no index has")
        values.follow(code, content[begin : min(at, begin + 20)])
    raise ValueError("it ends early")


_MOST_VALUES = 4096  # of a tuple with the tuples in it, which are paths and shapes
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_TAKEN_AND_LEFT = {  # values of the stack, for instructions that do not add exactly one
    **dict.fromkeys(b"\x80\x95", (0, 0)),
    **dict.fromkeys(b"0ab", (1, 0)),
    **dict.fromkeys(b"Q", (1, 1)),
    **dict.fromkeys(b"s", (2, 0)),
    **dict.fromkeys(b"R\x81\x93", (2, 1)),
    **dict.fromkeys(b"\x92", (3, 1)),
}
_TAKEN_TO_MARK = {**dict.fromkeys(b"1eu\x90", 0), **dict.fromkeys(b"ld", 1)}
_TAKES_TOO_MANY = "it takes values that it does not have"
_MARK, _TUPLE, _PUTS, _GETS = b"("[0], b"t"[0], b"pqr", b"ghj"


class _Values:
    """Sizes of the values on the stack of a pickle and in its memo: a tuple's size is one more than
    the sum of its values' sizes, and any other value has size one.

    Each tuple that holds the previous tuple of the memo twice doubles the number of values, all of
    which Python would visit to hash or compare it.
    """

    def __init__(self) -> None:
        self._stack: list[int] = []
        self._marks: list[int] = []
        self._memo: list[int] = []

    def follow(self, code: int, argument: bytes) -> None:
        """Apply an instruction to the sizes."""
        stack = self._stack
        if code == _MEMOIZE:
            self._memo.append(stack[-1])
        elif code in _PUTS:
            self._put(_number(code, argument))
        elif code in _GETS:
            stack.append(self._memo[_number(code, argument)])
        elif code == _MARK:
            self._marks.append(len(stack))
        elif code == _TUPLE or code in _TUPLES:
            first = self._marks.pop() if code == _TUPLE else len(stack) - _TUPLES[code]
            if first < 0:
                raise ValueError(_TAKES_TOO_MANY)
            size = 1 + sum(stack[first:])
            if size > _MOST_VALUES:
                raise ValueError(f"it has a tuple of more than {_MOST_VALUES} values")
            stack[first:] = [size]
        elif (left := _TAKEN_TO_MARK.get(code)) is not None:
            stack[self._marks.pop() :] = [1] * left
        else:
            taken, left = _TAKEN_AND_LEFT.get(code, (0, 1))
            if taken > len(stack):
                raise ValueError(_TAKES_TOO_MANY)
            stack[len(stack) - taken :] = [1] * left

    def _put(self, number: int) -> None:
        if not 0 <= number <= len(self._memo):
            raise ValueError(f"it keeps a value as number {number}, and had {len(self._memo)}")
        if number == len(self._memo):
            self._memo.append(self._stack[-1])
        else:
            self._memo[number] = self._stack[-1]


def _number(code: int, argument: bytes) -> int:
    """Return the number of a value in the memo: a line of text, or the bytes of an integer."""
    return int(argument) if code in b"gp" else int.from_bytes(argument, "little")


def _line_end(content: bytes, at: int) -> int:
    end = content.find(b"\n", at)
    if end < 0:
        raise ValueError("it ends early")
    return end + 1


class Stand:
    """Stand-in for an object of a pickle: the arguments of its class, and its state."""

    kind = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any) -> "Stand":
        made = super().__new__(cls)
        made.arguments, made.state = arguments, {}
        return made

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:  # fills an OrderedDict
        self.state[key] = value


class _Unpickler(pickle.Unpickler):
    """Reader of a pickle that runs none of it."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        # Classes of this reading alone: a pickle may set attributes of the classes that it names.
        self._stands: dict[str, type] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) not in _RECORDS:
            raise OperError(
                f"names {f'{module}.{name}'[:80]!r}, which no index of a checkpoint has, and which "
                "was not run; do not load this checkpoint by other programs either, unless you "
                "know who wrote it"
            )
        if name not in self._stands:
            self._stands[name] = type(name, (Stand,), {"kind": name})
        return self._stands[name]

    def persistent_load(self, _: Any) -> Any:
        raise OperError("refers to an object outside of itself, which no index of a checkpoint has")
