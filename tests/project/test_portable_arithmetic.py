"""Nothing that decides about a plan depends on the processor (oper/base/portable_math.py)."""

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Every figure and every row of a plan is computed in these.
PACKAGES = ("cost", "plan", "planner", "profiling", "tables", "topology")
# Libraries choose a version of these by the processor. So they do of sorts that are not stable,
# which then order equal elements in another way.
NUMPY = {
    *("dot", "vdot", "inner", "matmul", "einsum", "tensordot", "kron", "convolve", "correlate"),
    *("exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logaddexp", "power", "float_power"),
    *("geomspace", "logspace", "cbrt", "sin", "cos", "tan", "tanh", "sinh", "cosh", "hypot"),
    *("interp", "polyfit", "polyval", "cov", "corrcoef", "argpartition"),
}
MATH = {"exp", "expm1", "log", "log2", "log10", "log1p", "pow", "lgamma", "gamma", "erf", "fsum"}
# Figures of how far a sampled profile may be off, which no plan has; and text.
EXEMPT = {("profiling/sampling.py", "argpartition")}


def findings(path: Path) -> list[str]:
    """Return the file, line and name of each arithmetic that differs between processors."""
    name = path.relative_to(REPOSITORY / "oper").as_posix()
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        what, line = "", getattr(node, "lineno", 0)
        if isinstance(node, (ast.BinOp, ast.AugAssign)) and isinstance(node.op, ast.MatMult):
            what = "@"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, owner = node.func.attr, node.func.value
            module = owner.id if isinstance(owner, ast.Name) else ""
            if (module == "np" and called in NUMPY) or (module == "math" and called in MATH):
                what = called
            if called == "dot" or (isinstance(owner, ast.Attribute) and owner.attr == "linalg"):
                what = called
            options = {option.arg: ast.unparse(option.value) for option in node.keywords}
            if called == "argsort" and options.get("kind") != "'stable'":
                what = "argsort without kind='stable'"
        if isinstance(node, ast.ImportFrom) and node.module == "scipy.special":
            what = "scipy.special"
        if what and (name, what) not in EXEMPT:
            found.append(f"oper/{name}:{line}: {what}")
    return found


def test_what_decides_about_plans_uses_portable_arithmetic() -> None:
    folders = [REPOSITORY / "oper" / name for name in PACKAGES]
    paths = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    # PuLP's exact reference and the peer's planner run for `oper compare`, by a time limit.
    paths = [path for path in paths if path.name not in ("milp_solver.py", "torchrec_process.py")]
    assert len(paths) > 100
    assert [line for path in paths for line in findings(path)] == []


def test_findings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check sees each kind."""
    monkeypatch.setattr(f"{__name__}.REPOSITORY", tmp_path)
    (tmp_path / "oper").mkdir()
    path = tmp_path / "oper" / "some.py"
    path.write_text(
        "a @ b\na @= b\nnp.exp(a)\nmath.log(2)\na.dot(b)\nnp.linalg.norm(a)\n"
        "np.argsort(a)\na.argsort()\nfrom scipy.special import gammaln\n"
        "np.argsort(a, kind='stable')\nexp(a)\nnp.sqrt(a)\n"
    )
    lines = {int(line.split(":")[1]) for line in findings(path)}
    assert lines == set(range(1, 10))
