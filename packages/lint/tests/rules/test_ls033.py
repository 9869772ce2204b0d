"""LS033: what is right as it is."""

from lockstep_lint.config import configure
from lockstep_lint.runner import check_text

SOUND = """
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard


def shard(model):
    full = {}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if dist.get_rank() == 0:
        full = get_model_state_dict(model, options=options)
    fully_shard(model)
    set_model_state_dict(model, full, options=options)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    shard(torch.nn.Linear(2, 2))
    dist.destroy_process_group()
"""


def test_a_state_taken_before_the_model_is_sharded():
    assert check_text(SOUND, configure({}, "LS033", "")) == []
