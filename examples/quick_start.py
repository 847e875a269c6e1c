"""Count a log, plan a TorchRec model's tables, and train the model by the plan.

torchrun --nproc-per-node 2 examples/quick_start.py
"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import oper

LOG, SAMPLES, COLUMNS = "examples/clicks.parquet", 500, [f"C{n}" for n in range(1, 27)]
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()

# An ordinary model and its input: any iterable of KeyedJaggedTensor can be counted.
model = EmbeddingBagCollection(
    [EmbeddingBagConfig(5_100, 16, c, feature_names=[c]) for c in COLUMNS]
)
apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.005})
batches = list(oper.read(LOG, columns=COLUMNS, batch_size=SAMPLES))

# The plan: each rank makes the same one. `plan.save(folder)` and `oper.Plan.load(folder)` keep it.
profile = oper.profile((batch.to_kjt() for batch in batches), model)
plan = oper.make_plan(
    profile, f"cpu:{ranks}", oper.Workload("training", batch_size=ranks * SAMPLES)
)
model = oper.shard(model, plan)

for step, batch in enumerate(batches[rank::ranks]):
    logits = model(batch.to_kjt()).values().sum(1)
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.tensor(batch.label))
    loss.backward()  # each table's optimizer takes its step here
    if rank == 0 and step % 5 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
