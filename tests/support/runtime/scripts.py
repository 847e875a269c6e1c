"""Scripts as processes of their own, forked from one that has imported torch.

They end as a process ends that a shell starts, through Python's own end, and not as those of
multiprocessing do, which leave that out.
"""

import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

# No more than the scripts import: other packages change how errors are logged.
_PRELOADED = ["torch.distributed", "oper.runtime.comm.progress_signals"]

# Each request is a script and its arguments, with its standard streams and a socket. A fork of the
# server says there the number of the script's process and, when that has ended, its exit status.
# The script is the last that is run here, so that nothing of the server's comes after it, and what
# it names stays as long as the names of a program.
_SERVER = """
import importlib, json, os, socket, sys
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
server = socket.socket(fileno=int(sys.argv[2]))
while True:
    request, files, _, _ = socket.recv_fds(server, 1 << 16, 4)
    if not request:
        os._exit(0)
    if os.fork() == 0:
        server.close()
        answers = socket.socket(fileno=files[3])
        process = os.fork()
        if process == 0:
            break
        for file in (0, 1, 2, *files[:3]):
            os.close(file)
        answers.send(b"%d" % process)
        answers.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
        os._exit(0)
    for file in files:
        os.close(file)
answers.close()
for place, file in enumerate(files[:3]):
    os.dup2(file, place)
    os.close(file)
script, *sys.argv[1:] = json.loads(request)
exec(compile(script, "<string>", "exec"))
"""


class Script:
    """A script that runs, with what tests need of subprocess.Popen."""

    def __init__(self, script: str, *arguments: object) -> None:
        stdin, stdout, stderr = (os.pipe() for _ in range(3))
        self._status, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        given = [stdin[0], stdout[1], stderr[1], there.detach()]
        socket.send_fds(_server(), [json.dumps([script, *map(str, arguments)]).encode()], given)
        for file in given:
            os.close(file)
        self._stdin, self._stderr = stdin[1], stderr[0]
        self.stdout = open(stdout[0], encoding="utf-8")  # noqa: SIM115 (closed at the end)
        self.pid = int(self._status.recv(100))
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        if self.returncode is None and not select.select([self._status], [], [], 0)[0]:
            os.kill(self.pid, number)

    def wait(self, timeout: float) -> int:
        """How it ended: an exit status, or a signal's number with a minus."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("the script", timeout)
            self.returncode = int(self._status.recv(100))
        return self.returncode

    def errors(self, given: str = "", timeout: float = 30.0) -> str:
        """All that it writes to standard error until it ends, after it is given standard input."""
        if given:
            os.write(self._stdin, given.encode())
        end = time.monotonic() + timeout
        found = b""
        while select.select([self._stderr], [], [], max(0.0, end - time.monotonic()))[0]:
            if not (more := os.read(self._stderr, 1 << 16)):
                self.wait(timeout)
                return found.decode()
            found += more
        raise subprocess.TimeoutExpired("the script", timeout)

    def close(self) -> None:
        """End it, if it has not ended."""
        self.send_signal(signal.SIGKILL)
        self.wait(30)
        self._status.close()
        self.stdout.close()
        os.close(self._stdin)
        os.close(self._stderr)


@functools.cache
def _server() -> socket.socket:
    """The socket of a server for this process, which ends with it."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        command = [sys.executable, "-W", "ignore", "-c", _SERVER]
        command += [json.dumps(_PRELOADED), str(there.fileno())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    # It is not waited for, and ends when the socket is closed.
    process.returncode = 0
    return here
