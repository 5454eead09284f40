"""One private training on several processes: replicated or sharded models under torchrun.

Each process takes a share of every logical batch and clips its own samples; sums are added up over
processes, and noise is added to them once.

Example:
    Under ``torchrun --nproc-per-node 2 train.py``::

        device = dprc.distributed.start()
        model = make_model().to(device)
        processes = dprc.distributed.shard(model)  # or replicate(model)
        optimizer = torch.optim.AdamW(model.parameters())  # after sharding
        engine = dprc.PrivacyEngine(model, optimizer, processes=processes, ...)
        for logical_batch in engine.poisson_loader(dataset, ...):  # the same, whole dataset
            for batch in logical_batch:
                engine.backward(loss_fn(model, batch))
            engine.step()
        dprc.distributed.stop()
"""

from dprc.distributed.group import Group
from dprc.distributed.replication import Replicated, replicate
from dprc.distributed.sharding import Sharded, shard
from dprc.distributed.starting import start, stop

__all__ = ["Group", "Replicated", "Sharded", "replicate", "shard", "start", "stop"]
