"""LS041: weights of one rank."""

import pytest
from rule_findings import severities

from lockstep_lint.config import configure
from lockstep_lint.runner import check_paths

PARTED = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main(model, loader, rank, evaluate, epochs):
    dist.init_process_group("nccl")
    model = DDP(model.to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.{kind}
    for epoch in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            {step}
        {last}
    dist.destroy_process_group()
"""


PLATEAU = "ReduceLROnPlateau(optimizer)"


@pytest.mark.parametrize(
    ("step", "number"),
    [
        ("if rank == 0: optimizer.step()", 1),
        ("optimizer.step()", 0),
        ("if rank == 0: optimizer.step()\n            dist.broadcast(next(model.parameters()), 0)", 0),
        ("if rank == 0: optimizer.step()\n            else: optimizer.step()", 0),
    ],
)
def test_steps_of_some_ranks(step, number):
    step = step.replace("if rank == 0: optimizer", "if rank == 0:\n                optimizer")
    step = step.replace("else: optimizer", "else:\n                optimizer")
    assert len(severities(PARTED.format(kind=PLATEAU, step=step, last="pass"), "LS041")) == number


FLAG = {
    "main.py": """
import torch.distributed as dist
from trainer import Trainer

def main(params):
    dist.init_process_group("nccl")
    params["rank"] = dist.get_rank()
    params["loud"] = {flag}
    Trainer(params).train()

if __name__ == "__main__":
    main({{}})
""",
    "trainer.py": """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class Trainer:
    def __init__(self, params):
        self.loud = params["loud"]
        self.model = DDP(torch.nn.Linear(4, 2).to(params["rank"]), device_ids=[params["rank"]])
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        if self.loud:
            self.restore(params["path"])

    def restore(self, path):
        state = torch.load(path, map_location="cpu", weights_only=True)
        self.model.load_state_dict(state["model"])

    def train(self):
        for batch in self.batches():
            self.optimizer.zero_grad()
            self.model(batch).sum().backward()
            self.optimizer.step()
""",
}


@pytest.mark.parametrize(("flag", "lines"), [('params["rank"] == 0', [11]), ("bool(params)", [])])
def test_a_flag_of_the_rank_in_a_table_that_another_file_fills(tmp_path, flag, lines):
    for name, text in FLAG.items():
        (tmp_path / name).write_text(text.format(flag=flag) if name == "main.py" else text, encoding="utf-8")
    (tmp_path / "setup.py").write_text("", encoding="utf-8")
    told = check_paths([str(tmp_path / "trainer.py")], configure({}, "LS041", ""))
    assert [finding.line for finding in told] == lines
