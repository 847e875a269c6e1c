"""What ranks of a plan for inference do in tests, and what they must find."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv

import oper
from oper.base.errors import OperError
from oper.plan.address_map import AddressMap, unpack
from oper.plan.layout import LOCAL
from oper.plan.plan import Plan
from oper.runtime.engine import EmbeddingEngine
from oper.runtime.memory.runtime_plan import replicated
from oper.runtime.table_io import RowBlock, RowRange
from oper.runtime.tables.optimizer_buckets import TORCH_DTYPE
from oper.tables.table import tables_of
from tests.support.runtime.engine_cases import (
    Case,
    Reference,
    batch_of,
    features_of,
    initial,
    module_tables,
)
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import Model, batch, embedding_weights
from tests.support.torchrec.ranks import whole


class Server:
    """The engine of one rank, all rows written."""

    def __init__(self, rank: int, group: Any, case: Case, plan: Plan, nodes: Any = None) -> None:
        self.rank, self.group, self.case = rank, group, case
        self.engine = EmbeddingEngine(
            plan, module_tables(case), group=group, weighted=case.weighted, nodes=nodes,
            deadline_seconds=60,
        )  # fmt: skip
        self.write()

    def write(self, factor: float = 1.0) -> None:
        """Give all tables their values times a factor; each table is written by one rank."""
        mine = [n for n in range(len(self.case.rows)) if n % self.case.ranks == self.rank]
        self.engine.write_rows([RowBlock(n, 0, factor * initial(self.case, n)) for n in mine])

    def look_up(self, step: int) -> torch.Tensor:
        return self.engine(batch_of(self.case, step, self.rank)).detach().clone()


def serve(rank: int, group: Any, case: Case, plan: Plan, nodes: Any = None) -> dict[str, Any]:
    """A rank's outputs, its rows of all tables, its counters and its memory."""
    server = Server(rank, group, case, plan, nodes)
    engine = server.engine
    outputs = [server.look_up(step) for step in range(case.steps)]
    tables = engine.read_rows([RowRange(n, 0, rows) for n, rows in enumerate(case.rows)])
    found = {
        "outputs": outputs,
        "tables": tables,
        "counted": engine.counters.to_dict(),
        "heap_bytes": engine.heap.bytes,
        "memory": own_memory(),
    }
    engine.close()
    return found


def serve_alone(rank: int, group: Any, case: Case, plan: Plan) -> dict[str, Any]:
    """Ranks look up one after the other while the others sleep; the first gets a wrong id too."""
    server = Server(rank, group, case, plan)
    outputs, errors = [], []
    for turn in range(case.ranks):
        if turn == rank:
            if rank == 0:
                errors.append(error_of_wrong_id(server))
            outputs = [server.look_up(step) for step in range(case.steps)]
        dist.barrier(group)
    server.engine.close()
    return {"outputs": outputs, "errors": errors}


def serve_after_deaths(rank: int, group: Any, case: Case, plan: Plan) -> list[torch.Tensor]:
    """All ranks but the first are killed when tables are written, and the first looks up."""
    server = Server(rank, group, case, plan)
    if rank > 0:
        os.kill(os.getpid(), signal.SIGKILL)
    deadline = time.monotonic() + 60
    while any(server.engine.node.liveness.alive(peer) for peer in range(1, case.ranks)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return [server.look_up(step) for step in range(case.steps)]


def error_of_wrong_id(server: Server) -> str:
    batch = batch_of(server.case, 0, 0)
    batch.values()[0] = 10**6
    try:
        server.engine(batch)
    except OperError as error:
        return str(error)
    return ""


def write_again(rank: int, group: Any, case: Case, plan: Plan) -> dict[str, Any]:
    """Outputs before and after the tables were written a second time, and what may be written to
    meanwhile."""
    server = Server(rank, group, case, plan)
    modes = [heap_modes(server.engine)]
    outputs = [server.look_up(0)]
    modes.append(heap_modes(server.engine))
    server.write(2.0)
    modes.append(heap_modes(server.engine))
    outputs.append(server.look_up(0))
    modes.append(heap_modes(server.engine))
    server.engine.close()
    return {"outputs": outputs, "modes": modes}


def write_astray(case: Case, plan: Plan) -> None:
    """Ends the process."""
    server = Server(0, None, case, plan)
    server.look_up(0)
    server.engine.heap.rows(0)[0] = 1


def gradients_of_weights(rank: int, group: Any, case: Case, plan: Plan) -> torch.Tensor | None:
    server = Server(rank, group, case, plan)
    batch = batch_of(case, 0, rank)
    batch.weights().requires_grad_()
    server.engine(batch).sum().backward()
    server.engine.close()
    return batch.weights().grad


def serve_model(rank: int, group: Any, dtype: str) -> dict[str, Any]:
    """Outputs and state dict of a TorchRec model under a plan whose tables are of `dtype`, those
    of the same model unsharded with such tables, and how training mode fails."""
    tables = [replace(table, dtype=dtype) for table in tables_of(Model("cpu"))]
    plan = random_plan(
        1, tuple(tables), dist.get_world_size(group), replicated=0.5, mode="inference"
    )
    model = oper.shard(Model("cpu"), plan, env=ShardingEnv.from_process_group(group))
    inputs = batch(rank)
    with pytest.raises(OperError, match="made for inference, and the model is in training mode"):
        model(inputs)
    model.eval()
    _, output = model(inputs)
    unsharded = Model("cpu")
    for weight in embedding_weights(unsharded).values():
        weight.data = stored(weight.data, dtype)
    _, expected = unsharded(inputs)
    state = whole(model.state_dict(), group)
    model.load_state_dict(model.state_dict())
    _, again = model(inputs)
    torch.testing.assert_close(again, output)
    return {
        "outputs": (output.detach(), expected.detach()),
        "states": (state, {key: value.double() for key, value in unsharded.state_dict().items()}),
    }


def serve_collection(rank: int, group: Any, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of an fp32 collection under a plan's folder, and that of its tables as they are."""
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.rows, embedding_dim=t.dim, feature_names=[t.name]
        )
        for t in Plan.load(folder).tables
    ]
    torch.manual_seed(5)
    module = EmbeddingBagCollection(configs)
    model = oper.shard(module, folder, env=ShardingEnv.from_process_group(group)).eval()
    rows = torch.randint(0, 40, (2 * 7,), generator=torch.Generator().manual_seed(rank))
    request = KeyedJaggedTensor([c.name for c in configs], rows, lengths=torch.ones(14).long())
    return model(request).values(), module(request).values().detach()


def own_memory() -> dict[str, int]:
    """Bytes of memory, not of addresses, in the shared memory that this process has open, by name;
    peers' are the same."""
    found: dict[str, int] = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            name = os.readlink(descriptor)
        except OSError:
            continue
        if "/memfd:oper-" in name:
            name = name.split("oper-")[1].split(" ")[0]
            found[name] = found.get(name, 0) + 512 * os.stat(descriptor).st_blocks
    return found


def heap_modes(engine: EmbeddingEngine) -> set[str]:
    """How this process has mapped the arenas of all ranks that have rows: "rw-s" or "r--s"."""
    has_rows = torch.from_numpy(engine.plan.layout.slots > 0)
    bases = engine.heap.bases[:, : engine.ranks][has_rows]
    found = set()
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        place, mode, *_ = line.split()
        begin, end = (int(address, 16) for address in place.split("-"))
        if ((bases >= begin) & (bases < end)).any():
            found.add(mode)
    return found


class Expected(Reference):
    """The unsharded model; int8 tables hold what FBGEMM makes of the rows."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.tables = [stored(initial(case, n), case.dtype).double() for n in range(len(case.rows))]


def stored(rows: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rows as tables of a dtype hold them: int8 as FBGEMM's row-wise quantisation."""
    if dtype == "int8":
        packed = torch.ops.quantized.embedding_bag_byte_prepack(rows)
        return torch.ops.quantized.embedding_bag_byte_unpack(packed)
    return rows.to(TORCH_DTYPE[dtype]).float()


def expected_reads(case: Case, plan: Plan, rank: int) -> dict[str, Any]:
    """What the counters of a rank must say, from its map alone, for bags and batches of `case`."""
    address_map, layout = AddressMap.of(plan, rank), plan.layout
    everywhere = replicated(layout)
    by_rank = {name: np.zeros(plan.ranks, int) for name in ("accesses", "distinct", "bytes")}
    replicas, distinct_rows = 0, 0
    for step in range(case.steps):
        batch = batch_of(case, step, rank)
        offsets, stride = batch.offsets().tolist(), batch.stride()
        of_key = [n for n in range(len(case.rows)) for _ in features_of(case, n)]
        ids: list[list[torch.Tensor]] = [[] for _ in case.rows]
        for key, table in enumerate(of_key):
            ids[table].append(batch.values()[offsets[key * stride] : offsets[(key + 1) * stride]])
        for table, parts in enumerate(ids):
            values = torch.cat(parts).long()
            group = layout.locate(table, values.numpy()).group
            replica = (group >= 0) & everywhere[np.maximum(group, 0)]
            field = unpack(address_map.translate(table, values))[0].numpy()
            source = np.where(field == LOCAL, rank, field)[~replica]
            replicas += int(replica.sum())
            single = values.numpy()[~replica]
            _, first = np.unique(single, return_index=True)
            distinct_rows += len(np.unique(values))
            by_rank["accesses"] += np.bincount(source, minlength=plan.ranks)
            by_rank["distinct"] += np.bincount(source[first], minlength=plan.ranks)
            read = source if plan.workload.fetch == "raw" else source[first]
            row_bytes = plan.tables[table].row_bytes
            by_rank["bytes"] += row_bytes * np.bincount(read, minlength=plan.ranks)
    return by_rank | {"replicas": replicas, "distinct_rows": distinct_rows}
