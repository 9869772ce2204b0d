"""How samples are loaded: errors named and tried again with the same bits, processes that die, and that are ended."""

import gc
import multiprocessing
import os
import random
import re
import resource
import signal
import sqlite3
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from refusals import refuses
from toys import Partial, Ragged

import lockstep
from lockstep.data import loader
from lockstep.data.batches import Batches, Loading, StepPlan
from lockstep.data.loader import check_dataset
from lockstep.data.sampler import Shuffled
from lockstep.distributed.world import World
from lockstep.errors import ConfigError, DataError, SampleError, StorageError
from lockstep.guards.samples import RetryingDataset, loading_failures


class Noisy:
    """Sample i is i and three random numbers; `bad` ones fail after they have drawn, `times` times in all."""

    def __init__(self, size=12, bad=(), times=0, many=False):
        self.size, self.bad = size, bad
        self.left = torch.tensor(times).share_memory_()
        if many:
            self.draws_random = False
            self.__getitems__ = lambda indices: [self[index] for index in indices]

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        found = index, torch.rand(()).item(), np.random.random(), random.random()
        if index in self.bad and self.left > 0:
            self.left -= 1
            raise OSError(5, "Input/output error", f"{index}.png")
        return found


class Task(Partial):
    def collate(self, samples):
        return {"samples": samples, "noise": torch.rand(()).item()}

    def count(self, batch):
        return len(batch["samples"])


def feed(dataset, task=None, workers=0, retries=0, samples=12, micro=2):
    order, step_plan = Shuffled(len(dataset), 1), StepPlan(4, micro, samples)
    return Batches(task or Task(), dataset, order, step_plan, World(), seed=1, loading=Loading(workers, 2, retries))


def content(batches):
    stream = batches.from_step(0)
    found = [(step, [(b.index, b.items, b.data) for b in micro]) for step, micro in stream]
    stream.close()
    return found


def guarded(dataset, retries=2, skips=0):
    return RetryingDataset(dataset, retries=retries, skips=skips, rank=0)


@pytest.mark.parametrize("workers", [0, 2])
def test_retried_sample_is_bitwise_that_of_a_run_without_error(workers):
    healthy = content(feed(guarded(Noisy())))
    dataset = guarded(Noisy(bad={3, 7}, times=2))
    assert content(feed(dataset, workers=workers)) == healthy
    assert dataset.counts.tolist() == [2, 0]


def test_loader_processes_may_be_started_outside_the_main_thread():
    """There torch sets no handler of signals, and none may be put back."""
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: content(feed(Noisy(), workers=1))).result() == content(feed(Noisy()))


@pytest.mark.parametrize("workers", [0, 1])
def test_replacement_sample_draws_as_in_its_own_place(workers):
    def drawn(batches):
        return [sample for _, micro in content(batches) for *_, data in micro for sample in data["samples"]]

    healthy = drawn(feed(guarded(Noisy())))
    own = {sample[0]: sample for sample in healthy}
    found = drawn(feed(guarded(Noisy(bad={3, 4}, times=99), retries=1, skips=4), workers=workers))
    wanted = [own[5] if sample[0] in (3, 4) else sample for sample in healthy]
    assert found == wanted


def test_a_whole_batch_that_fails_is_loaded_one_by_one():
    class Many(Noisy):
        draws_random = False

        def __getitem__(self, index):
            return super().__getitem__(index)[0]

        def __getitems__(self, indices):
            return [self[index] for index in indices]

    healthy = [[b[2]["samples"] for b in micro] for _, micro in content(feed(guarded(Many())))]
    dataset = guarded(Many(bad={3, 7}, times=4), retries=3)
    assert [[b[2]["samples"] for b in micro] for _, micro in content(feed(dataset))] == healthy
    assert dataset.counts.tolist() == [3, 0]


class BadCollate(Task):
    def collate(self, samples):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal\nand more")


class BadCount(Task):
    def count(self, batch):
        return int(batch["none"])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("task", "line"),
    [
        (
            BadCollate(),
            r"`collate` failed at rank 0, step 1, samples \d+, \d+: RuntimeError: DataLoader worker \(pid 7",
        ),
        (BadCount(), r"`count` failed at rank 0, step 1, samples \d+, \d+: KeyError: 'none' \(test_loading.py:\d+\)"),
    ],
)
def test_error_in_the_tasks_code_is_one_line_and_no_dead_process(workers, task, line):
    with pytest.raises(DataError, match=line) as caught:
        content(feed(Noisy(), task, workers, retries=5))
    assert "\n" not in str(caught.value)
    assert "died" not in str(caught.value)
    if workers:  # the way there is not lost: a user who sees the traceback sees this too
        assert "test_loading.py" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [0, 1])
def test_unloadable_sample_is_one_line_from_a_process_too(workers):
    with pytest.raises(DataError) as caught:
        content(feed(guarded(Noisy(bad={3}, times=99), retries=0), workers=workers))
    wanted = r"rank 0: sample 3 \(3.png\) cannot be loaded: OSError[^\n]*--guards.bad-samples N"
    assert re.fullmatch(wanted, str(caught.value))


class Unanswered(Noisy):
    def __getitem__(self, index):
        raise StorageError("the store does not answer")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_store_that_does_not_answer_is_no_bad_sample(workers):
    dataset = guarded(Unanswered(), skips=5)
    with pytest.raises(StorageError) as caught:
        content(feed(dataset, workers=workers))
    assert str(caught.value) == "the store does not answer"
    assert dataset.counts.tolist() == [0, 0]


class Killer(Noisy):
    """Ends the process that loads sample 5, as often as there are files to take away: killed, or with code 0."""

    def __init__(self, folder):
        super().__init__()
        self.folder = folder

    def __getitem__(self, index):
        left = list(self.folder.iterdir())
        if index == 5 and left:
            left[0].unlink()
            if left[0].name == "exit":
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_loader_process_that_dies_is_restarted_without_loss(tmp_path):
    (tmp_path / "once").touch()
    batches = feed(Killer(tmp_path), workers=1, retries=1)
    assert content(batches) == content(feed(Noisy()))
    assert loading_failures([guarded(Noisy()), batches.loader]) == [0, 0, 1]
    (tmp_path / "exit").touch()  # that would be the second in this start of the run
    with pytest.raises(DataError, match=r"rank 0: a loader process died in step \d: "):
        content(batches)


class Small(Noisy):
    """Its loader processes may make no shared memory of more than 100 bytes, as where /dev/shm is full."""

    def __getitem__(self, index):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
        return torch.zeros(100)


class Unsent(Task):
    def collate(self, samples):
        return {"samples": samples, "noise": lambda: None}


def test_a_batch_that_cannot_be_sent_is_one_line_and_no_wait():
    for task in (Task(), None):  # sent by a thread; collated into shared memory by torch
        with refuses(SampleError, "/dev/shm", "--data.workers 0"):
            content(feed(Small(), task, workers=1, retries=5))
    with refuses(SampleError, "rank 0, step 1", "`collate`"):
        content(feed(Noisy(), Unsent(), workers=1, retries=5))


BLOCKED_FORKS = []  # a folder; each file in it is taken by one forked child, which then runs no line more


def block_once():
    left = [file for folder in BLOCKED_FORKS for file in folder.iterdir()]
    if left:
        left[0].unlink()
        os.kill(os.getpid(), signal.SIGSTOP)


os.register_at_fork(after_in_child=block_once)


@pytest.fixture
def blocked_forks(tmp_path, monkeypatch):
    """A folder: so many children that are forked never start as there are files in it."""
    monkeypatch.setattr(loader, "_START_TIMEOUT", 0.5)
    BLOCKED_FORKS.append(tmp_path)
    yield tmp_path
    BLOCKED_FORKS.clear()


@pytest.mark.parametrize(("workers", "blocked"), [(1, 1), (2, 1), (2, 3)])
def test_loader_process_that_never_starts_is_replaced(blocked_forks, workers, blocked):
    """One that is alone; one of two, of which the other has loaded meanwhile; both, and one of the next two."""
    healthy, before = content(feed(Noisy())), children()
    for number in range(blocked):
        (blocked_forks / str(number)).touch()
    batches, drawn = feed(Noisy(), workers=workers), torch.get_rng_state()
    assert content(batches) == healthy
    assert batches.loader.restarts == (2 if blocked > workers else 1)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert children() <= before


def test_loaders_that_never_start_are_an_error_with_the_way_out(blocked_forks, monkeypatch):
    monkeypatch.setattr(loader, "_START_TIMEOUT", 0.01)
    before = children()
    for number in range(9):
        (blocked_forks / str(number)).touch()
    with pytest.raises(DataError, match=r"--data\.workers 0") as caught:
        content(feed(Noisy(), workers=1))
    assert "\n" not in str(caught.value)
    assert children() <= before


@pytest.fixture
def forkserver():
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("forkserver", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


@pytest.mark.usefixtures("forkserver")
def test_loader_processes_that_a_server_forks_live_too():
    """Their parent, as the system sees it, is the server: how Python begins processes from 3.14 on."""
    assert content(feed(Noisy(), workers=1)) == content(feed(Noisy()))


@pytest.mark.usefixtures("forkserver")
def test_what_cannot_be_sent_to_a_loader_process_is_one_line():
    class Local(Noisy):
        pass

    with refuses(ConfigError, "--data.workers", "forkserver", "Local", "set_start_method"):
        content(feed(Local(), workers=1))


def children():
    """The living children of this process."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(") ")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z":
            found.add(int(path.parent.name))
    return found


class Slow(Noisy):
    def __getitem__(self, index):
        if index >= 8:
            time.sleep(600)
        return super().__getitem__(index)


def test_closing_a_feed_ends_its_processes_whatever_they_do():
    before, handler = children(), signal.getsignal(signal.SIGCHLD)
    batches = feed(Slow(), workers=2)
    batches._order.at = lambda start, stop: (np.zeros(stop - start, int), np.arange(start, stop))
    stream = batches.from_step(0)
    next(stream)
    assert len(children() - before) == 2
    assert signal.getsignal(signal.SIGCHLD) is handler  # torch's would raise out of any line
    stream.close()
    assert children() <= before
    assert [stream.items(step) for step in (1, 2, 9)] == [0, 0, 0]
    assert list(stream) == []
    stream.close()


def test_a_feed_that_fails_leaves_no_process():
    before = children()
    with pytest.raises(DataError):
        content(feed(Noisy(), BadCollate(), workers=2))
    assert children() <= before


def torchs_handler():
    """The handler of SIGCHLD that torch installs with the first loader of a process, as somebody's script has it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    torch.utils.data._utils.signal_handling._SIGCHLD_handler_set = False
    list(torch.utils.data.DataLoader([1, 2], num_workers=1))
    return signal.getsignal(signal.SIGCHLD)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_torchs_handler_for_another_loader_does_not_raise(when):
    before, handler = children(), signal.getsignal(signal.SIGCHLD)
    try:
        if when == "before":
            assert callable(torchs_handler())
        stream = feed(Noisy(), workers=2).from_step(0)
        next(stream)
        if when == "meanwhile":
            assert callable(torchs_handler())
        else:
            assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        stream.close()
        assert signal.getsignal(signal.SIGCHLD) is signal.SIG_DFL
        assert children() <= before
    finally:
        signal.signal(signal.SIGCHLD, handler)


class Cyclic:
    """Is freed by a garbage collection alone, and notes in which process."""

    def __init__(self, log):
        self.itself, self.log = self, log

    def __del__(self):
        with self.log.open("a") as file:
            print(os.getpid(), file=file)


GARBAGE_AT_FORK = []  # logs; for each, a fork finds a Cyclic that nobody has, and the child collects at once
os.register_at_fork(
    before=lambda: [Cyclic(log) for log in GARBAGE_AT_FORK] and None,
    after_in_child=lambda: gc.set_threshold(1) if GARBAGE_AT_FORK else None,
)


class Dropping(Noisy):
    """Drops in the loader process what was alive when that was forked, and collects garbage."""

    def __init__(self, log):
        super().__init__()
        self.alive = Cyclic(log)

    def __getitem__(self, index):
        self.alive = None
        gc.collect()
        return super().__getitem__(index)


@pytest.mark.parametrize("collecting", [True, False])
def test_a_loader_process_frees_nothing_that_it_was_forked_with(tmp_path, collecting):
    """A tensor of a CUDA device that several streams used would abort it."""
    log, healthy = tmp_path / "freed", content(feed(Noisy()))
    log.touch()
    GARBAGE_AT_FORK.append(log)
    try:
        if not collecting:
            gc.disable()
        assert content(feed(Dropping(log), workers=2)) == healthy
        assert gc.isenabled() is collecting
    finally:
        gc.enable()
        GARBAGE_AT_FORK.clear()
    gc.collect()
    assert set(log.read_text().split()) == {str(os.getpid())}


class Collected(Noisy):
    """A sample is: are collections on, did one free an object made here."""

    def __getitem__(self, index):
        class Own:
            pass

        own = Own()
        own.itself, freed = own, weakref.ref(own)
        del own
        gc.collect()
        return gc.isenabled(), freed() is None


@pytest.mark.parametrize("collecting", [True, False])
def test_loader_process_collects_garbage_as_its_parent_does(collecting):
    if not collecting:
        gc.disable()
    try:
        found = content(feed(Collected(), workers=1))
    finally:
        gc.enable()
    assert {sample for _, micro in found for *_, data in micro for sample in data["samples"]} == {(collecting, True)}


@pytest.mark.usefixtures("forkserver")
def test_a_loader_process_that_was_not_forked_collects_too():
    found = content(feed(Collected(), workers=1))
    assert {sample for _, micro in found for *_, data in micro for sample in data["samples"]} == {(True, True)}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "named"),
    [
        (Stream(), ("Stream", "__len__", "__getitem__")),
        (iter([1]), ("list_iterator", "__len__", "__getitem__")),
        (torch.utils.data.Dataset(), ("Dataset", "__len__")),
        (None, ("NoneType",)),
    ],
)
def test_a_dataset_without_an_index_is_refused_in_one_line(dataset, named):
    with refuses(DataError, "dataset('train')", *named) as caught:
        check_dataset(dataset, "train")
    assert "\n" not in str(caught.value)


def test_lists_and_tensors_are_datasets():
    check_dataset([1, 2], "train")
    check_dataset(torch.ones(3), "train")


def test_task_without_collate_and_count_gets_the_defaults():
    class Bare(Partial):
        pass

    found = next(feed(torch.arange(12), Bare()).from_step(0))[1]
    assert [batch.data.shape for batch in found] == [(2,), (2,)]
    assert [batch.items for batch in found] == [2, 2]
    assert Bare().count({"image": torch.zeros(3, 4), "label": torch.zeros(3)}) == 3
    Bare.items_per_sample = 2
    assert next(feed(torch.arange(12), Bare()).from_step(0))[1][0].items == 4


def test_an_evaluation_set_is_held_to_the_same(tmp_path):
    class Streamed(Ragged):
        def dataset(self, split):
            return super().dataset(split) if split == "train" else iter([1])

    config = lockstep.Config(save_dir=str(tmp_path), batch_size=8, max_steps=1, device="cpu")
    with pytest.raises(DataError, match=r"dataset\('evaluation'\) returned list_iterator, which has no __len__"):
        lockstep.train(config, Streamed(dtype=torch.float32))


class Numbered(torch.utils.data.Dataset):
    """Number i is line i of a file that was opened before the fork, by its descriptor and through a buffer."""

    def __init__(self, path, connection=None):
        self.raw, self.parts = os.open(path, os.O_RDONLY), {"db": connection}
        self.text = open(path)  # noqa: SIM115

    def __len__(self):
        return 400

    def __getitem__(self, index):
        os.lseek(self.raw, 5 * index, os.SEEK_SET)
        time.sleep(0)
        found = int(os.read(self.raw, 4))
        self.text.seek(5 * index)
        return index, found, int(self.text.readline())


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # on a machine with two cores
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_file_open_before_the_fork_is_reopened_by_each_loader(tmp_path, workers):
    path = tmp_path / "numbers"
    path.write_text("".join(f"{number:04d}\n" for number in range(400)))
    dataset = Numbered(path)
    found = [data["samples"] for _, micro in content(feed(dataset, None, workers, 0, 400, 8)) for *_, data in micro]
    dataset.text.close()
    assert sorted(each for samples in found for each in samples) == [(number,) * 3 for number in range(400)]


def test_shared_connection_is_refused_by_its_attribute(tmp_path):
    path = tmp_path / "numbers"
    path.write_text("0000\n" * 400)
    connection = sqlite3.connect(":memory:")
    dataset = Numbered(path, connection)
    with pytest.raises(DataError, match=r"parts\['db'\].*--data.workers 0"):
        content(feed(guarded(dataset), workers=1))
    assert len(content(feed(guarded(dataset)))) == 3
    dataset.text.close()
    connection.close()
