"""A file of JSON lines that grows: each line is written whole, or not at all."""

import json
import os
import stat
from collections import deque
from pathlib import Path

from oper.base.errors import OperError
from oper.files.input_files import Kind, open_file, refuse_url
from oper.monitoring.period_report import PeriodReport

# It grows for as long as a run does, and is read line by line.
LINES = Kind("a file of a monitor's JSON lines", None)


class JsonLines:
    """A file that a monitor appends its reports to; it may be there, of runs before."""

    def __init__(self, path: Path | str) -> None:
        """Open the file. Raise OperError if it cannot be opened, or is not a monitor's file."""
        refuse_url(path, written=True)
        self.path = Path(path)
        if self.path.exists():
            with open_file(self.path, LINES) as file:
                check_first_line(self.path, file.readline())
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            self._file = os.open(self.path, flags, 0o666)
        except OSError as error:
            raise OperError(
                f"{self.path}: cannot be written ({error.strerror}); give a file in a folder that "
                "is there"
            ) from error
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            self.close()
            raise OperError(
                f"{self.path}: expected a regular file to append to, got another kind of file"
            )

    def append(self, report: PeriodReport) -> None:
        """Append a report. Raise OperError if the disk is full: the file is then as it was."""
        line = report.line().encode()
        size = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written < len(line):
                os.write(self._file, line[written:])
            if os.fstat(self._file).st_size < size + len(line):
                raise OSError(0, "it was written in part")
        except OSError as error:
            os.ftruncate(self._file, size)
            raise OperError(
                f"{self.path}: a line could not be written ({error.strerror})"
            ) from error

    def close(self) -> None:
        """Close the file, once or again."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def check_first_line(path: Path, line: bytes) -> None:
    """Raise OperError if a file begins with something else than a monitor's reports."""
    if line:
        report_of_line(path, 1, line)


def report_of_line(path: Path, number: int, line: bytes) -> PeriodReport:
    """Return the report that a line has; raise OperError if it is not one of a monitor's."""
    try:
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("is no JSON object")
        return PeriodReport.from_json(content)
    except (ValueError, OverflowError, RecursionError) as error:
        said = " ".join(str(error).split())[:200]
        raise OperError(
            f"{path}, line {number:,}: is not what a monitor writes ({said}); give the file that "
            "was named to oper.monitor(…, jsonl=FILE)"
        ) from error


class GrowingReports:
    """The reports of a file that a monitor may be appending to."""

    def __init__(self, path: Path) -> None:
        self._path, self._lines, self._read_bytes = path, 0, 0

    def new(self, most: int) -> list[PeriodReport]:
        """Return at most the last `most` reports that came since the last call. Raise OperError if
        the file is gone, or its content is not a monitor's."""
        last: deque[tuple[int, bytes]] = deque(maxlen=most)
        with open_file(self._path, LINES) as file:
            if os.fstat(file.fileno()).st_size < self._read_bytes:  # it is another file now
                self._lines, self._read_bytes = 0, 0
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # it is still being written
                self._lines, self._read_bytes = self._lines + 1, self._read_bytes + len(line)
                if self._lines == 1:
                    check_first_line(self._path, line)
                last.append((self._lines, line))
        return [report_of_line(self._path, number, line) for number, line in last]
