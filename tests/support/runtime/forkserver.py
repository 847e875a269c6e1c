"""The process that all ranks of tests are forked from: it has imported what they need, once.

There is one for a whole run of pytest, and it imports when the first rank is started: so all that
start processes share the list. A rank is made in a tenth of a second, and without it in seconds.
"""

import multiprocessing

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    [
        "hypothesis",
        "pytest",
        "torch.utils.data",
        "torchrec",
        "torchrec.distributed.model_parallel",
        "torch.distributed.checkpoint",
        "oper.runtime.engine",
        "oper.torchrec",  # with pyarrow and scipy, which profiles and plans are made with
        "tests.support.runtime.mortal_ranks",
        "tests.support.scheduler.loader_cases",
        "tests.support.torchrec.training_cases",
        "tests.support.runtime.frozen",  # the last
    ]
)
