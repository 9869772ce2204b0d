"""What the four scripts share: their flags, a tiny model, its data, and a journal of what was trained.

Nothing here knows of lockstep. The journal is the proof that a mistake changes the training, made without
`lockstep trace`: the weights after every update on every rank, and the evaluations that the script reports.
"""

import argparse
import faulthandler
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import Dataset, default_collate

TRAIN, VALID, LENGTH, WIDTH, CLASSES = 40, 13, 6, 6, 3
BATCH, EPOCHS = 8, 2
STEPS = EPOCHS * TRAIN // BATCH
MOMENT = 3  # at which update a mistake that has a moment shows
IGNORED = -100
PADDING = 0.5
LONGEST = 120  # seconds of one script, which takes five to ten

Batch = dict[str, Tensor]


def arguments(
    mistakes: tuple[str, ...], *switches: str, choices: dict[str, tuple[str, ...]] | None = None
) -> argparse.Namespace:
    """The flags that all scripts have; `mistakes` are what `--mistake` takes, the others further flags."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)  # a script that hangs, in its exit too, shows where
    parser = argparse.ArgumentParser()
    parser.add_argument("--mistake", default="", choices=["", *mistakes])
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of each process in a step")
    parser.add_argument("--clip", type=float, default=0.0, help="largest norm of the gradient; 0: not clipped")
    parser.add_argument("--dropout", action="store_true", help="mask numbers, drawn for each of them")
    parser.add_argument("--shake", action="store_true", help="one random number a forward: how much the block counts")
    parser.add_argument("--batchnorm", action="store_true")
    parser.add_argument("--ragged", action="store_true", help="samples have 1 to 6 labels instead of 6")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bf16"], help="bf16: autocast")
    parser.add_argument(
        "--order",
        default="",
        choices=["", "pad-shift", "shift-pad"],
        help="labels are those of the next vectors",
    )
    parser.add_argument("--save", default="", help="write a checkpoint here")
    parser.add_argument("--save-at", type=int, default=7, help="after that many updates")
    parser.add_argument("--resume", default="", help="go on from this checkpoint")
    parser.add_argument("--out", default="", help="write the journal here, with the rank behind the name")
    for switch in switches:
        parser.add_argument(f"--{switch}", action="store_true")
    for name, values in (choices or {}).items():
        parser.add_argument(f"--{name}", choices=values, default=values[0])
    return parser.parse_args()


class Sentences(Dataset[Batch]):
    """Sequences of 6 vectors [6, 6] float32, and their labels [6] int64, of which IGNORED ones do not count.

    With an `order`: of 2 to 7, without those that do not count, and the label of each is what the one before predicts.
    """

    def __init__(self, count: int, seed: int, ragged: bool, order: str) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.order = order
        places = LENGTH + (order != "")
        self.x = torch.randn(count, places, WIDTH, generator=generator)
        teacher = torch.randn(WIDTH, CLASSES, generator=torch.Generator().manual_seed(5))
        self.labels = (self.x @ teacher).argmax(-1)
        if ragged:
            lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=generator) + (order != "")
            self.labels[torch.arange(places) >= lengths] = IGNORED

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Batch:
        if not self.order:
            return {"x": self.x[index], "labels": self.labels[index]}
        kept = self.labels[index] != IGNORED
        return {"x": self.x[index][kept], "labels": self.labels[index][kept]}


def collator(args: argparse.Namespace) -> Callable[[list[Batch]], Batch]:
    """What makes a batch of samples."""
    if not args.order:
        return default_collate

    def padded(rows: list[Tensor], value: float) -> Tensor:
        return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)

    def collate(samples: list[Batch]) -> Batch:
        x, labels = ([sample[name] for sample in samples] for name in ("x", "labels"))
        if args.order == "pad-shift":
            return {"x": padded(x, PADDING)[:, :-1], "labels": padded(labels, IGNORED)[:, 1:]}
        return {
            "x": padded([each[:-1] for each in x], PADDING),
            "labels": padded([each[1:] for each in labels], IGNORED),
        }

    return collate


def datasets(args: argparse.Namespace) -> tuple[Sentences, Sentences]:
    """Training and validation."""
    return Sentences(TRAIN, 11, args.ragged, args.order), Sentences(VALID, 2, args.ragged, args.order)


class Toy(nn.Module):
    """[batch, 6, 6] -> logits [batch, 6, 3]. `seed_of_mask`: seeds the generators in each forward (a mistake)."""

    def __init__(self, args: argparse.Namespace, seed_of_mask: int | None = None) -> None:
        super().__init__()
        self.first, self.block, self.head = nn.Linear(WIDTH, 16), nn.Linear(16, 16), nn.Linear(16, CLASSES)
        self.norm: nn.Module = nn.BatchNorm1d(16) if args.batchnorm else nn.Identity()
        self.dropout = nn.Dropout(0.2 if args.dropout else 0.0)
        self.shake, self.seed_of_mask = args.shake, seed_of_mask

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        if self.training and self.seed_of_mask is not None:
            torch.manual_seed(self.seed_of_mask)
        share = torch.rand(()) if self.training and self.shake else 1.0  # one number for the whole batch
        hidden = hidden + share * self.dropout(self.block(hidden).tanh())
        return self.head(hidden)


def model(args: argparse.Namespace, seed_of_mask: int | None = None) -> Toy:
    torch.manual_seed(0)
    return Toy(args, seed_of_mask)


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction=reduction
    )


def pretrained(plain: nn.Module) -> dict[str, Tensor]:
    """The weights of "a file": other ones than those that the model was made with."""
    generator = torch.Generator().manual_seed(9)
    return {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in plain.state_dict().items()
    }


def flip(plain: nn.Module) -> None:
    """The lowest bit of the first weight: a defective memory."""
    first = next(plain.parameters())
    first.detach().view(-1)[:1].view(torch.int32)[0] ^= 1


def swap(optimizer: torch.optim.Optimizer) -> None:
    """Gives each parameter's momentum another place in it: the state of another part of the model."""
    for state in optimizer.state.values():
        for key in ("momentum_buffer", "exp_avg"):
            if isinstance(state.get(key), Tensor):
                state[key] = state[key].flatten().roll(state[key].numel() // 2).view_as(state[key])


class Journal:
    """The weights after each update of any optimizer, and what is reported."""

    def __init__(self, plain: nn.Module, out: str) -> None:
        self.out, self.weights, self.evaluations = out, [], []
        if out:
            register_optimizer_step_post_hook(lambda *_: self.weights.append(self._flat(plain)))

    def _flat(self, plain: nn.Module) -> list[float]:
        return torch.cat([tensor.detach().flatten() for tensor in plain.state_dict().values()]).tolist()

    def report(self, value: float) -> None:
        """An evaluation's result, as the script reports it on rank 0."""
        if os.environ.get("RANK", "0") == "0":
            print(f"evaluation: {value:.6f}", flush=True)
            self.evaluations.append(value)

    def close(self, **more: Any) -> None:
        if self.out:
            found = {"weights": self.weights, "evaluations": self.evaluations, **more}
            Path(f"{self.out}.{os.environ.get('RANK', '0')}").write_text(json.dumps(found))
