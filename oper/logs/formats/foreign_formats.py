"""Formats that oper does not read, by their first bytes, and ways to convert them.

Without this, the text of such a file would be split at commas, and the error, if any, would speak
of columns.
"""

import re
import zipfile
from pathlib import Path
from typing import NamedTuple

from oper.base.errors import OperError, one_line
from oper.logs.formats.numpy_arrays import open_archive
from oper.logs.formats.text_lines import beginning

HEAD_BYTES = 512

_TO_PARQUET = "convert it to Parquet"
_UNPACK = "unpack it first"


class _Format(NamedTuple):
    name: str
    signature: bytes  # a pattern that the file's beginning matches
    remedy: str


_FORMATS = tuple(
    _Format(name, signature, remedy)
    for remedy, formats in {
        f"{_UNPACK}, as only gzip is read compressed": {
            "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
            "bzip2": rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)",
            "xz": rb"\xfd7zXZ\0",
            "lz4": rb"[\x02\x04]\x22\x4d\x18",
            "lzip": rb"LZIP",
            "lzma": rb"\x5d\0\0.{2}(\xff{8}|.{5}\0\0\0)",
            "Snappy": rb"\xff\x06\0\0sNaPpY",
            "LZO": rb"\x89LZO\0\r\n\x1a\n",
            "compress": rb"\x1f[\x9d\xa0]",
        },
        f"{_UNPACK}, and pass its files": {
            "tar archive": rb".{257}ustar",
            "7-Zip archive": rb"7z\xbc\xaf\x27\x1c",
            "RAR archive": rb"Rar!\x1a\x07",
            "cpio archive": rb"07070[127]",
        },
        f"{_TO_PARQUET}: pyarrow.orc.read_table, then pyarrow.parquet.write_table": {
            "ORC": rb"ORC",
        },
        f"{_TO_PARQUET}: pyarrow.feather.read_table, then pyarrow.parquet.write_table": {
            "Feather": rb"FEA1",
            "Arrow": rb"ARROW1\0\0",
        },
        f"{_TO_PARQUET}: pyarrow.ipc.open_stream, then pyarrow.parquet.write_table": {
            "Arrow stream": rb"\xff\xff\xff\xff.{2}[\x00-\x7f]\0.{4}",
        },
        "decrypt it: write the Parquet file again without encryption": {
            "encrypted Parquet": rb"PARE",
        },
        _TO_PARQUET: {
            "Avro": rb"Obj\x01",
            "Hadoop SequenceFile": rb"SEQ[\x04-\x06]",
            "RCFile": rb"RCF\x01",
            "HDF5": rb"\x89HDF\r\n\x1a\n",
            "NetCDF": rb"CDF[\x01\x02\x05]",
            "SQLite": rb"SQLite format 3\0",
            "DuckDB": rb".{8}DUCK",
            "Excel (.xls)": rb"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1",
            "MATLAB": rb"MATLAB \d",
            "R data": rb"RD[AX][23]\n|[XA]\n\0\0\0[\x02\x03]",
            "Stata": rb"<stata_dta>",
            "SPSS": rb"\$FL[23]@\(#\)",
            "SAS": rb"\0{12}\xc2\xea\x81\x60|HEADER RECORD\*{7}",
            "safetensors": rb".{5}\0\0\0\{\s*\"",
            "pickle": rb"\x80[\x02-\x05]",
            "LMDB": rb".{16}\xde\xc0\xef\xbe",
        },
        "write one JSON object per line for each sample": {
            "YAML": rb"(%YAML[^\n]*\n)?---[ \t]*\r?\n"
            rb"|(#[^\n]*\n)*- +[\w.-]+:( [^\n]*)?\r?\n( +[\w.-]+:|- )",
            "YAML or textproto": rb"(#[^\n]*\n)*([\w.-]+):([ \t][^\n]*)?\r?\n"
            rb"\s*(?!\2:)[\w.-]+:(\s|\Z)",
            "textproto": rb"(#[^\n]*\n)*(\w+:?\s*[{<]\s*\w+\s*[:{<]"
            rb"|(\w+: +(\"[^\"\n]*\"|[^\s\",]+) +)+\w+: +(\"[^\"\n]*\"|[^\s\",]+) *\r?\n)",
        },
        "keep the objects alone: sed 's/^[^{]*//'": {
            "JSON behind other text": rb"[^\n{\x1e]*\w[^\n{\x1e]*"
            rb"\{\s*\"(?:[^\"\\\n]|\\.)*\"\s*:",
        },
        r"remove the record separators: tr -d '\036'": {
            "a JSON text sequence": rb"\x1e\s*[{\[]",
        },
        "write one line per sample, as CSV with a line of column names, or as Parquet": {
            # Comments and samples without features may be first.
            "LIBSVM or LIBFFM": rb"(#[^\n]*\n|[-+]?[0-9.]+[ \t]*\r?\n)*[-+]?[0-9.][0-9.,]*"
            rb"([ \t]+qid:[0-9]+)?([ \t]+[0-9]+:[-+0-9.:eE]+)+[ \t]*(#[^\n]*)?\r?\n",
            "Matrix Market": rb"%%MatrixMarket\s",
            "a table for a terminal": rb"\s*\+-[-+]*\+\r?\n"
            rb"|[^\n]*\S[^\n]*\n ?-[-+]*\+-[-+]* ?\r?\n",
            "Markdown": rb" *\|[^\n]*\| *\r?\n *\|[-:| ]*-[-:| ]*\| *\r?\n",
            "Vowpal Wabbit": rb"[-+]?[0-9.]+( [0-9.]+)?( '\S+)? ?\|\S* \S"
            rb"|([-+]?[0-9.]+ [0-9.]+ [^\s|]+)?\|[^\s|]+( [^\s|]+)+( \|[^\s|]+( [^\s|]+)*)*"
            rb"\s*(\n|\Z)",
            "INI or TOML": rb"\[[\w. -]+\][ \t]*\r?\n[\w.-]+[ \t]*=",
            "ARFF": rb"(%[^\n]*\n|\s)*@(?i:relation)\s",
            "SQL": rb"(?i:(--[^\n]*\n|/\*.*?\*/;?|\s)*(insert into|create table)\s)",
            "XML": rb"\s*<(\?xml|(?!(?i:html|head)\b)[A-Za-z_][\w:.-]*(\s[^<\n]*)?>\s*<)",
        },
        "remove the lines before its first object": {
            "JSON lines below comments": rb"(\s*(#|//)[^\n]*\n)+\s*\{\s*\"",
        },
        "convert it to UTF-8, for example with iconv": {
            "UTF-16 or UTF-32 text": rb"\xff\xfe|\xfe\xff|\0\0\xfe\xff",
        },
        "it is an error page instead of the log: download the log again": {
            "HTML": rb"\s*<(?i:!doctype html|html|head)",
        },
        "run `git lfs pull` to get the log": {
            "Git LFS pointer": rb"version https://git-lfs\.github\.com/",
        },
        "remove its first line, which names the separator, and give it as the delimiter": {
            "CSV for Excel": rb"(\xef\xbb\xbf)?\"?sep=.\"?\r?\n",
        },
        "it is no log": {
            "PDF": rb"%PDF-",
            "image": rb"\x89PNG\r|\xff\xd8\xff|GIF8[79]a",
            "programme": rb"\x7fELF|MZ.{58}|#!/",
        },
    }.items()
    for name, signature in formats.items()
)
_PATTERNS = tuple((f, re.compile(f.signature, re.DOTALL)) for f in _FORMATS)
# Endings that only a format of bytes has.
_BINARY = {".parquet": "Parquet", ".npy": ".npy", ".npz": ".npz", ".pt": "FBGEMM .pt"}
_READ = re.compile(rb"PAR1|\x93NUMPY|PK[\x03\x05]")  # formats that are read, though not gzipped


def refuse(path: Path, head: bytes) -> None:
    """Raise OperError if a file that begins with `head`, of `HEAD_BYTES`, is in a format that oper
    does not read; it names the format and the remedy."""
    if head[:2] == b"\x1f\x8b":
        head = beginning(path, HEAD_BYTES)
        if _READ.match(head) and not path.name.endswith((".pt.gz", ".pth.gz")):
            raise OperError(
                f"{path}: expected a text or a request file within gzip, got Parquet, NumPy or "
                f"zip; {_UNPACK}"
            )
    is_torch = path.name.removesuffix(".gz").endswith((".pt", ".pth"))
    if head[:2] == b"PK" and not is_torch:
        _refuse_zip(path)
        return
    foreign = next((form for form, pattern in _PATTERNS if pattern.match(head)), None)
    if foreign is not None and not (is_torch and foreign.name == "pickle"):
        raise _refused(path, foreign.name, foreign.remedy)
    if _is_tfrecord(head):
        raise _refused(path, "TFRecord", _TO_PARQUET)
    ending = Path(path.name.removesuffix(".gz")).suffix
    if ending in _BINARY and _is_text(head):
        shown = head.partition(b"\n")[0].decode("utf-8", "replace")[:40]
        raise OperError(
            f"{path}: expected {_BINARY[ending]}, as its name says, got text, {shown!r}; rename it "
            f"without {ending} if it is CSV or JSON lines"
        )


def _refused(path: Path, name: str, remedy: str) -> OperError:
    return OperError(
        f"{path}: expected Criteo TSV, CSV, JSON lines, Parquet, .npz, .npy or FBGEMM .pt, got "
        f"{name}, which oper does not read; {remedy}"
    )


def _refuse_zip(path: Path) -> None:
    with open_archive(path) as archive:
        try:
            names = archive.namelist()
        except (zipfile.BadZipFile, OSError) as error:  # It was read when it was opened.
            raise OperError(f"{path}: cannot be read ({one_line(error)})") from error
    if any(name.endswith(".npy") for name in names):
        return
    if "[Content_Types].xml" in names:
        raise _refused(path, "Excel (.xlsx)", f"{_TO_PARQUET}, or save it as CSV")
    if any(name.endswith("data.pkl") for name in names):
        raise OperError(
            f"{path}: is a file of torch.save; give it the ending .pt if it is a request file of "
            f"FBGEMM, or {_TO_PARQUET}"
        )
    raise _refused(path, "a zip archive", f"{_UNPACK}, and pass its files")


def _is_text(head: bytes) -> bool:
    """Return whether a file's beginning is UTF-8 without control characters of other formats."""
    text = head.decode("utf-8", "ignore")
    is_whole = len(head) - len(text.encode()) < 4 * (len(head) == HEAD_BYTES) + 1
    return is_whole and re.search(r"[\0\x03-\x08\x0e-\x1b]", text) is None


def _is_tfrecord(head: bytes) -> bool:
    """Return whether a file begins with the length of a record and the length's masked CRC-32C."""
    if len(head) < 12:
        return False
    crc = 0xFFFFFFFF
    for byte in head[:8]:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    return masked == int.from_bytes(head[8:12], "little")
