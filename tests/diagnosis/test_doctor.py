"""`oper doctor`: real models that fit, and each way in which one does not."""

import json
import re
import shutil
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import oper as package
from oper.base import native
from oper.base.errors import OperError
from oper.base.free_memory import FreeMemory
from oper.base.spoken import by_command_line
from oper.diagnosis import machine_findings
from oper.diagnosis.diagnosis import Diagnosis, Finding
from oper.diagnosis.doctor import doctor
from oper.diagnosis.memory_findings import row_bytes
from oper.diagnosis.table_findings import table_findings
from oper.plan.plan import Plan
from oper.runtime.memory import heap
from oper.topology.transports import STAGE_BYTES
from tests.support.commands import fine, oper, refused
from tests.support.torchrec.models import Model
from tests.support.torchrec.one_rank import plan_of

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLE = REPOSITORY / "examples" / "train_dlrm.py"


@pytest.fixture(scope="module")
def _planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Plans of a small Criteo log: `cpu` for two CPU ranks, `gpu` for a DGX A100."""
    folder = tmp_path_factory.mktemp("doctor")
    log, profile = folder / "log.parquet", folder / "profile"
    fine("synth", "criteo-kaggle", "-o", log, "--scale", 0.0003, "--samples", 2000)
    fine("profile", log, "-o", profile, "--tables", folder / "log.tables.yaml")
    for name, topology in (("cpu", "cpu:2"), ("gpu", "dgx-a100")):
        command = ("plan", profile, "-o", folder / name, "--topology", topology)
        fine(*command, "--batch-size", 512)
    shutil.copy(EXAMPLE, folder / "model.py")
    return folder


@pytest.fixture
def there(_planned: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(_planned)
    return _planned


def problems(found: Diagnosis | list[Finding]) -> list[tuple[str, str]]:
    findings = found.findings if isinstance(found, Diagnosis) else found
    return [(f.about, f.says) for f in findings if f.level == "problem"]


# What fits


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("plan", ["cpu", "gpu"])
def test_a_dlrm_fits_the_plan_of_its_tables(plan: str) -> None:
    said = oper("doctor", plan, "model.py:make_dlrm")
    assert said.status == 0, said
    assert "all 26 of the model's tables" in said.out
    assert said.out.endswith("model.py:make_dlrm: all fits\n")
    assert ("host memory" in said.out, "(dgx-a100)" in said.out) == (plan == "cpu", plan == "gpu")
    content = json.loads(fine("doctor", plan, "model.py:make_dlrm", "--json"))
    assert content["ok"]
    assert {f["level"] for f in content["findings"]} <= {"ok", "note"}


@pytest.mark.usefixtures("there")
def test_python_has_the_findings_of_the_command() -> None:
    said = json.loads(fine("doctor", "gpu", "model.py:make_dlrm", "--json"))
    for topology in (None, "dgx-a100", package.Topology.load("dgx-a100")):
        with by_command_line():
            found = package.doctor("gpu", "model.py:make_dlrm", topology)
        assert {"plan": "gpu", "model": "model.py:make_dlrm", **found.to_dict()} == said
    with pytest.raises(OperError, match=r"model: expected Module or str, got \w*Path"):
        package.doctor("gpu", Path("model.py"))  # type: ignore[arg-type]


def test_rows_are_counted_as_the_engine_allocates_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heap, "_ALIGNMENT", 4)  # of arenas: the room between them is no row's
    model = Model("cpu")
    plan = plan_of(model)
    _, matched = table_findings(plan, model)
    device, tier = row_bytes(plan, matched)
    sharded = package.shard(model, plan)
    engines = [m.engine for m in sharded.modules() if hasattr(m, "_engine")]
    allocated = sum(engine.heap.bytes for engine in engines)
    assert len(matched) == len(engines)
    assert tier.tolist() == [0]
    assert device.tolist() == [allocated]


# What does not


def dlrm(change: Callable[[list[EmbeddingBagConfig]], Any] = lambda configs: None) -> nn.Module:
    """A model for the plan of `small_plan`, but for a change of its tables' configs."""
    configs = [
        EmbeddingBagConfig(name="a", num_embeddings=40, embedding_dim=8, feature_names=["a"]),
        EmbeddingBagConfig(name="b", num_embeddings=20, embedding_dim=8, feature_names=["b"]),
    ]
    change(configs)
    model = nn.Sequential(nn.Linear(4, 4))
    tables = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
    model.add_module("tables", tables)
    return model


def small_plan() -> Plan:
    return plan_of(dlrm(), ranks=2)


def change(number: int, **values: Any) -> Callable[[list[EmbeddingBagConfig]], Any]:
    return lambda configs: vars(configs[number]).update(values)


def test_the_small_model_fits() -> None:
    assert problems(doctor(small_plan(), dlrm())) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (change(0, num_embeddings=41), r"'a': the plan has 40 rows .* the model 41"),
        (change(1, embedding_dim=4), r"'b': the plan has 20 rows of dim 8.* of dim 4"),
        (change(0, data_type=DataType.FP16), r"'a': .* fp32, and the model .* fp16"),
        (change(0, name="c"), r"'c': the plan has no such table"),
        (change(0, use_virtual_table=True), r"'a': its config sets use_virtual_table"),
    ],
    ids=["rows", "dim", "dtype", "name", "unsupported"],
)
def test_tables_that_differ_are_problems(changed: Any, words: str) -> None:
    found = problems(doctor(small_plan(), dlrm(changed)))
    assert len(found) == 1, found
    assert re.search(words, found[0][1]), found


def test_all_tables_that_differ_are_named() -> None:
    def both(configs: list[EmbeddingBagConfig]) -> None:
        change(0, num_embeddings=41)(configs)
        change(1, num_embeddings=19)(configs)

    found = problems(doctor(small_plan(), dlrm(both)))
    assert len(found) == 2
    assert "'a'" in found[0][1]
    assert "'b'" in found[1][1]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (change(0, pooling=PoolingType.MEAN), "'a': the model pools by mean"),
        (change(0, feature_names=["x"]), "'a': the model reads it by x, and the plan counted a"),
        (lambda configs: configs.pop(), "not in the model: b"),
    ],
    ids=["pooling", "features", "fewer"],
)
def test_what_a_plan_does_not_depend_on_is_a_note(changed: Any, words: str) -> None:
    found = doctor(small_plan(), dlrm(changed))
    assert problems(found) == []
    assert any(f.level == "note" and words in f.says for f in found.findings), found


def test_another_optimizer_is_a_note_and_is_counted() -> None:
    model = dlrm()
    other = dlrm()
    weight: Any
    for weight in other.tables.parameters():  # type: ignore[union-attr]
        weight._optimizer_classes = [torch.optim.Adam]
    plan = small_plan()
    found = doctor(plan, other)
    assert problems(found) == []
    assert any(
        "the plan was made for sgd, and adam is what trains" in f.says for f in found.findings
    )
    (sgd, _), (adam, _) = (row_bytes(plan, table_findings(plan, m)[1]) for m in (model, other))
    assert (adam == 3 * sgd).all()  # two states of a value each


class Tailored(EmbeddingBagCollection):
    pass


def test_modules_that_no_sharder_takes() -> None:
    model = dlrm()
    configs = model.tables.embedding_bag_configs()  # type: ignore[union-attr, operator]
    tailored = nn.Sequential(Tailored(tables=list(configs), device=torch.device("meta")))
    wrong = problems(doctor(small_plan(), tailored))
    assert any("a Tailored" in says and about == "modules" for about, says in wrong)
    model.add_module("positions", nn.Embedding(10, 4))
    found = doctor(small_plan(), model)
    assert problems(found) == []
    assert any(
        "'positions', a torch.nn.Embedding" in f.says and "has a copy" in (f.do or "")
        for f in found.findings
    )


def test_two_tables_of_one_name() -> None:
    model = nn.ModuleList([dlrm(), dlrm()])
    assert any(
        "both have one of that name" in says for _, says in problems(doctor(small_plan(), model))
    )


def test_a_model_without_tables() -> None:
    (found,) = problems(doctor(small_plan(), nn.Linear(2, 2)))
    assert "holds no EmbeddingBagCollection" in found[1]


@pytest.mark.usefixtures("there")
def test_ranks_that_do_not_fit_their_devices() -> None:
    Path("tiny.yaml").write_text(
        "node_of: [0, 0, 0, 0, 0, 0, 0, 0]\nallreduce_bandwidth: 9GB/s\ndevice_memory: 100kB\n"
        "bandwidth: {local: 9GB/s, same_node: 5GB/s}\n"
    )
    said = oper("doctor", "gpu", "model.py:make_dlrm", "--topology", "tiny.yaml")
    assert said.status == 1
    assert "8 of 8 ranks do not fit" in said.out
    assert "has 0.1 MB (tiny)" in said.out
    assert "1 thing would not fit" in said.out
    refused("doctor gpu model.py:make_dlrm --topology 2x2-a100", "4 ranks, and the plan 8")


@pytest.mark.parametrize(("host", "status"), [("1GB", 0), ("1kB", 1)])
@pytest.mark.usefixtures("there")
def test_the_tier_against_the_hosts(host: str, status: int) -> None:
    Path("hosts.yaml").write_text(
        "node_of: [0, 0, 0, 0, 0, 0, 0, 0]\nallreduce_bandwidth: 9GB/s\ndevice_memory: 1GB\n"
        "bandwidth: {local: 9GB/s, same_node: 5GB/s}\nhost_bandwidth: 2GB/s\n"
        f"host_memory: {host}\n"
    )
    command = ("plan", "profile", "-o", "tier", "--topology", "dgx-a100", "--tier", "all")
    fine(*command, "--batch-size", 512, "--force")
    said = oper("doctor", "tier", "model.py:make_dlrm", "--topology", "hosts.yaml")
    assert said.status == status, said
    text = said.out.replace("\n", " ")
    assert ("8 of 8 ranks do not fit" in text) == (status == 1)
    assert "tier: " in text
    assert "needs" in text


@pytest.mark.usefixtures("there")
def test_a_host_with_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "oper.diagnosis.doctor.free_memory", lambda: [FreeMemory("the machine", "m", 1000)]
    )
    said = oper("doctor", "cpu", "model.py:make_dlrm")
    assert said.status == 1
    assert "WRONG host memory: 2 CPU ranks on this host" in said.out.replace("\n", " ")


class _Device:
    """A device that can be used, with so many bytes free."""

    def __init__(self, number: int, free_bytes: int) -> None:
        self._free = FreeMemory(f"cuda:{number}, X,", f"gpu {number}", free_bytes)

    def free_memory(self) -> list[FreeMemory]:
        return [self._free]


REFUSED = Finding("problem", "devices", "cuda:1, X, is of architecture sm_75")


@pytest.mark.parametrize(
    ("free", "refused", "level", "words"),
    [
        ([10**9] * 8, [], "ok", "devices: 8 here, and the plan has 8 a node (dgx-a100)"),
        ([10**9] * 8, [], "ok", "device memory here: cuda:7, X, has 1 GB free, and 1 rank there"),
        ([10**9] * 2, [], "note", "2 here that can be used, and the plan has 8 a node"),
        ([10**9] * 2, [], "ok", "device memory here: cuda:1, X, has 1 GB free, and 4 ranks there"),
        ([10**9, 1000], [], "WRONG", "device memory here: cuda:1, X, has 0.001 MB free"),
        ([10**9], [REFUSED], "WRONG", "devices: cuda:1, X, is of architecture sm_75"),
        ([], [], "note", "devices: none here (the driver is too old), and the plan has 8 a node"),
    ],
)
@pytest.mark.usefixtures("there")
def test_devices_of_a_plan_for_inference(
    monkeypatch: pytest.MonkeyPatch, free: list[int], refused: list[Any], level: str, words: str
) -> None:
    if not Path("serves").exists():
        command = ("plan", "profile", "-o", "serves", "--topology", "dgx-a100")
        fine(*command, "--mode", "inference", "--batch-size", 512)
    devices = [_Device(number, left) for number, left in enumerate(free)]
    monkeypatch.setattr("oper.diagnosis.doctor.usable_devices", lambda: (devices, refused))
    monkeypatch.setattr(machine_findings, "why_no_device", lambda: "the driver is too old")
    said = oper("doctor", "serves", "model.py:make_dlrm")
    text = " ".join(said.out.split())
    assert f"{level} {words}" in text or f"{level} devices: {words}" in text, text
    assert said.status == (level == "WRONG")


@pytest.mark.usefixtures("there")
def test_devices_of_several_nodes_have_as_much_symmetric_memory_as_the_one_with_the_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("nodes.yaml").write_text(
        "node_of: [0, 0, 1, 1]\nbandwidth: {local: 1e12, same_node: 1e11, other_node: 2e10}\n"
        "allreduce_bandwidth: 7e10\ndevice_memory: 40GB\ntransport: nvshmem\n"
    )
    fine("plan", "profile", "-o", "nodes", "--topology", "nodes.yaml", "--mode", "inference")
    devices = [_Device(number, 10**9) for number in range(2)]
    monkeypatch.setattr("oper.diagnosis.doctor.usable_devices", lambda: (devices, []))
    said = oper("doctor", "nodes", "model.py:make_dlrm")
    text = " ".join(said.out.split())
    assert said.status == 0
    assert "ok devices: 2 here, and the plan has 2 a node (nodes)" in text
    plan = Plan.load("nodes")
    needed = re.search(r"needs ([0-9.]+) GB", text)
    assert needed is not None
    least = plan.cost.memory_bytes.max() + STAGE_BYTES + plan.cost.step_bytes
    assert float(needed[1]) >= round(least / 1e9, 3) > 0.067


@pytest.mark.parametrize("fetch", ["raw", "distinct"])
@pytest.mark.usefixtures("there")
def test_a_row_for_each_access_from_other_nodes_is_told(
    monkeypatch: pytest.MonkeyPatch, fetch: str
) -> None:
    command = ("plan", "profile", "-o", fetch, "--topology", "2x4-h100", "--fetch", fetch)
    fine(*command, "--batch-size", 512)
    devices = [_Device(number, 10**9) for number in range(4)]
    monkeypatch.setattr("oper.diagnosis.doctor.usable_devices", lambda: (devices, []))
    said = oper("doctor", fetch, "model.py:make_dlrm")
    text = " ".join(said.out.split())
    assert said.status == 0
    told = "the plan fetches a row for each access, and the ranks are on 2 nodes"
    assert (told in text) == (fetch == "raw")
    assert ("ok devices: 4 here" in text) == (fetch == "distinct")


@pytest.mark.usefixtures("there")
def test_devices_of_a_plan_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step takes beside rows counts: it is most of what this model does."""
    plan, devices = Plan.load("gpu"), [_Device(number, 10**9) for number in range(8)]
    step = plan.cost.step_bytes
    assert step > 3 * plan.cost.memory_bytes.max()
    monkeypatch.setattr("oper.diagnosis.doctor.usable_devices", lambda: (devices, []))
    said = oper("doctor", "gpu", "model.py:make_dlrm")
    assert said.status == 0
    text = " ".join(said.out.split())
    assert "ok devices: 8 here, and the plan has 8 a node (dgx-a100)" in text
    assert f"and {step / 1e6:.3g} MB for a step of the plan's batch" in text
    devices[:] = [_Device(number, step) for number in range(8)]
    said = oper("doctor", "gpu", "model.py:make_dlrm")
    assert said.status == 1
    assert "WRONG device memory here: cuda:0, X, has" in " ".join(said.out.split())


def test_devices_that_cannot_be_used_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(name: str) -> Any:
        if name != "cuda:0":
            raise OperError("its driver is too old")
        return name

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(machine_findings, "Cuda", made)
    found, problems_of_others = machine_findings.usable_devices()
    assert list(map(str, found)) == ["cuda:0"]
    assert problems(problems_of_others) == [("devices", "its driver is too old")]


@pytest.mark.parametrize(
    ("environment", "level", "words"),
    [
        ({}, "ok", "torchrun --nproc-per-node 2"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "ok", "both have 2"),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"}, "note", "started 1 on this one"),
        ({"WORLD_SIZE": "4"}, "problem", "for 2 ranks, and WORLD_SIZE is 4"),
    ],
)
def test_ranks_against_torchrun(environment: dict[str, str], level: str, words: str) -> None:
    (found,) = machine_findings.rank_findings(small_plan(), environment)
    assert found.level == level
    assert words in found.says


def test_ranks_of_this_host() -> None:
    plan = plan_of(dlrm(), ranks=4)
    second = {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    assert machine_findings.ranks_here(plan, second) == [2, 3]
    assert machine_findings.ranks_here(plan, {"WORLD_SIZE": "8"}) == machine_findings.ranks_here(
        plan, {}
    )


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    stated = " ".join([*project["dependencies"], *extras["cpu"], *extras["gpu"]])
    releases = machine_findings.RELEASES
    for name in ("fbgemm-gpu-cpu", "fbgemm-gpu", "torchrec"):
        (release,) = re.findall(rf"\b{name}==(\d+\.\d+)", stated)
        assert release in releases.values()
    lowest, above = re.findall(r"torch>=2\.(\d+),<2\.(\d+)", stated)[0]
    assert [*releases] == [f"2.{n}" for n in range(int(lowest), int(above))]


INSTALLED = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"torch": "2.11.0+cu130", "torchrec": "1.6.1", "fbgemm-gpu-cpu": "1.6.0"}, []),
        ({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, []),
        ({"torchrec": "1.9.2"}, ["expected torchrec 1.8 with torch 2.13; got 1.9.2"]),
        ({"torch": "2.15.0"}, ["expected torch 2.11, 2.12, 2.13, 2.14; got 2.15.0"]),
        (
            {"torch": "2.12.1"},
            [
                "expected torchrec 1.7 with torch 2.12; got 1.8.0",
                "expected fbgemm-gpu-cpu 1.7 with torch 2.12; got 1.8.0",
            ],
        ),
    ],
)
def test_packages_of_another_release_are_problems(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, str], expected: list[str]
) -> None:
    installed = INSTALLED | changed

    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version)
    found = machine_findings.version_findings()
    assert [finding.says for finding in found if finding.level == "problem"] == expected


def test_other_versions_and_kernels_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert problems(machine_findings.version_findings()) == []
    real = metadata.version
    monkeypatch.setattr(
        metadata, "version", lambda name: "2.101.0" if name == "torch" else real(name)
    )

    def fails() -> None:
        raise OperError("cannot load the native kernels; build them")

    monkeypatch.setattr(native, "ops", fails)
    found = machine_findings.version_findings()
    assert [about for about, _ in problems(found)] == ["versions", "kernels"]
    assert found[0].says.endswith("; got 2.101.0")
    assert found[-1].says.endswith("; build them")


# Files of models

FILES = {
    "raises.py": "def make():\n    x = 1\n    return {}['tables']\n",
    "deep.py": "import json\n\ndef make():\n    return json.loads('{')\n",
    "syntax.py": "def make(:\n    pass\n",
    "leaves.py": "import sys\nsys.exit('no data')\n",
    "imports.py": "import no_such_package\n",
    "number.py": "def make():\n    return 3\n",
    "several.py": "def make(plan, layers):\n    return None\n",
    "fine.py": "def make_model():\n    pass\n",
}


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("raises.py:make", ["raises.py, line 3: KeyError: 'tables'"]),
        ("deep.py:make", ["deep.py, line 4: ", "JSONDecodeError"]),
        ("syntax.py:make", ["syntax.py, line 1: SyntaxError"]),
        ("leaves.py:make", ["leaves.py, line 2: SystemExit: no data"]),
        ("imports.py:make", ["imports.py, line 1: ModuleNotFoundError", "no_such_package"]),
        ("number.py:make", ["expected to return a torch.nn.Module, got int"]),
        ("several.py:make", ["of the plan alone, got one that takes plan, layers"]),
        ("fine.py:make", ["no function 'make'", "did you mean make_model?"]),
        ("fine.py", ["'fine.py'", "model.py:make"]),
        ("absent.py:make", ["absent.py", "no such file"]),
    ],
)
def test_errors_of_the_users_file(there: Path, spec: str, words: list[str]) -> None:
    for name, content in FILES.items():
        Path(name).write_text(content)
    said = oper("doctor", "cpu", spec)
    assert said.status == 2, said
    assert said.errors.startswith("error: ")
    assert said.errors.count("\n") == 1
    assert all(word in said.errors for word in words), said.errors
