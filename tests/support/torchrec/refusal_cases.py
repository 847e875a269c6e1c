"""What ranks do in tests of the settings, plans and ids that OPER refuses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import DataType

import oper
from oper.base.errors import OperError
from oper.tables.table import Table, tables_of
from tests.support.runtime.runtime_plans import random_plan
from tests.support.torchrec.models import Model, batch


def refused(rank: int, group: dist.ProcessGroup) -> None:
    """What OPER cannot do it says."""
    env = ShardingEnv.from_process_group(group)
    Sharder = oper.OperEmbeddingBagCollectionSharder
    model = Model("meta")
    plan = random_plan(0, tables_of(model), dist.get_world_size(group))

    def fails(text: str, call: Callable[[], Any]) -> None:
        with pytest.raises(OperError, match=text):
            call()

    fails("does not quantise", lambda: Sharder(plan, qcomm_codecs_registry={"forward": object()}))
    fails("output_dtype FP16", lambda: Sharder(plan, {"output_dtype": DataType.FP16}))
    fails("weights_precision", lambda: Sharder(plan, {"weights_precision": DataType.FP16}))
    fails("no plan", lambda: Sharder().shard(model.bags, {}, env))
    on_meta = torch.device("meta")
    fails("device meta: .* give cpu or", lambda: Sharder(plan).shard(model.bags, {}, env, on_meta))
    fails("gradient_clipping", lambda: Sharder(plan, {"gradient_clipping": True}))
    weight: Any = model.bags.embedding_bags["wide"].weight
    weight._optimizer_classes = [torch.optim.SGD, torch.optim.Adam]
    fails("2 optimizers", lambda: Sharder(plan).shard(model.bags, {}, env))
    weight._optimizer_classes, weight._optimizer_kwargs = [torch.optim.LBFGS], [{}]
    fails("LBFGS", lambda: Sharder(plan).shard(model.bags, {}, env))
    spread = ShardingEnv(env.world_size, env.rank, group, output_dtensor=True)
    fails("DTensor", lambda: Sharder(plan).shard(model.bags, {}, spread))


def refused_plans(rank: int, group: dist.ProcessGroup) -> None:
    """Plans for other tables, ranks or modes are refused on all ranks, and so are unlike ones."""
    env = ShardingEnv.from_process_group(group)
    model, tables, ranks = Model("meta"), tables_of(Model("meta")), dist.get_world_size(group)

    def fails(
        text: str, changed: Sequence[Table], ranks: int = ranks, seed: int = 0, **named: Any
    ) -> None:
        with pytest.raises(OperError, match=text):
            oper.shard(model, random_plan(seed, tuple(changed), ranks, **named), env=env)

    fails(f"the plan is for {ranks + 1} ranks", tables, ranks + 1)
    fails("'tiny': the plan has no such table", [t for t in tables if t.name != "tiny"])
    fails("'wide': the plan has 51 rows", [replace(tables[0], rows=51), *tables[1:]])
    fails("of dim 20, fp32, and the model", [replace(tables[0], dim=20), *tables[1:]])
    fails("fp16, and the model", [replace(tables[0], dtype="fp16"), *tables[1:]])
    fails("make a plan for this model", [Table("strange", 5, 4)])
    fails("the same plan", tables, seed=rank)
    fails("the same plan", tables, method=("bitmap", "dense")[rank])
    for_inference = oper.shard(model, random_plan(0, tables, ranks, mode="inference"), env=env)
    with pytest.raises(OperError, match="the model is in training mode"):
        for_inference(batch(rank))
    for_inference.eval()
    with torch.no_grad():
        for_inference(batch(rank))
        held = for_inference.state_dict()
        if rank == 0:
            held["bags.embedding_bags.wide.weight"].local_shards()[0].tensor.zero_()
            with pytest.raises(OperError, match="'wide': a state dict of a model for inference"):
                for_inference(batch(rank))
        else:
            for_inference(batch(rank))
        for_inference.load_state_dict(held)
        for_inference(batch(rank))


def ids_out_of_range(rank: int, group: dist.ProcessGroup) -> None:
    """They read row 0 where TorchRec's bounds check says so, and else fail by name."""
    configs = [EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])]
    plan = random_plan(0, tables_of(EmbeddingBagCollection(configs)), dist.get_world_size(group))
    env = ShardingEnv.from_process_group(group)

    def found(ids: list[int], fused_params: dict[str, Any]) -> Any:
        model = EmbeddingBagCollection(configs, device=torch.device("meta"))
        made = oper.shard(model, plan, env=env, fused_params=fused_params)
        features = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(2).int())
        with torch.no_grad():
            return made(features).values()

    with pytest.raises(OperError, match="feature 'f': id -3"):
        found([1, -3], {})
    for mode in (BoundsCheckMode.IGNORE, BoundsCheckMode.WARNING):
        named = {"bounds_check_mode": mode}
        assert torch.equal(found([1, 99], named), found([1, 0], named))
