"""Files that a user names are opened in one way: `oper/files/input_files.py`."""

import ast

from tests.project.test_architecture import modules

READERS = {"open", "os.open", "read_text", "read_bytes", "fromfile", "load_file", "safe_open"}
READERS |= {"np.load", "open_memmap", "yaml.safe_load"}
# What they open, where it is not what a user names.
OTHERS = {
    "oper.base.free_memory": "the kernel's figures",
    "oper.base.standard_streams": "the null device and what a descriptor leads to",
    "oper.checkpoint.direct_file": "what it writes",
    "oper.checkpoint.export": "what it writes",
    "oper.files.input_files": "the one way",
    "oper.files.storage": "what was written, to flush it",
    "oper.files.temporaries": "our own locks",
    "oper.files.json_file": "what it writes",
    "oper.monitoring.json_lines": "lines that it appends",
    "oper.profiling.counter_arrays": "counters that it makes",
    "oper.profiling.counter_files": "counters that it writes",
    "oper.report.render_page": "a part of the package",
    "oper.runtime.comm.lost_ranks": "the kernel's figures",
    "oper.runtime.comm.node": "the kernel's figures",
    "oper.synth.recipes": "a part of the package",
}


def test_no_other_module_opens_files() -> None:
    found = {
        module: f"{module}, line {call.lineno}: {ast.unparse(call.func)}"
        for module, path in modules().items()
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call) and reads(call)
    }
    assert not [found[module] for module in found.keys() - OTHERS.keys()]
    assert not OTHERS.keys() - found.keys(), "these open nothing any more"


def reads(call: ast.Call) -> bool:
    """Whether it is a call of one of the READERS, but for methods called `open`."""
    name = ast.unparse(call.func)
    ours = isinstance(call.func, ast.Name) and name in ("read_text", "read_bytes")
    method = name.rpartition(".")[2]
    return not ours and (name in READERS or (method != "open" and method in READERS))
