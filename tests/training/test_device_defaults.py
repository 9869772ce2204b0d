"""--precision auto and --compile auto: by the devices of all ranks, kept on a resume; eager where nothing compiles."""

import tomllib

import counting
import pytest
import torch
from ranks import run
from refusals import names, refuses
from small_runs import config
from toys import Ragged

import lockstep
from lockstep import checkpoint
from lockstep.config import cli
from lockstep.config.schema import Config
from lockstep.errors import ConfigError, ResumeError
from lockstep.transforms import precision

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler's own

LINE = "device default: --precision bf16 --compile; to turn it off: --precision float32 --no-compile"


def task():
    return Ragged(dtype=torch.float32)


def settings(folder, name="r", **changes):
    return config(folder, **{"experiment_name": name, "precision": "auto", "max_steps": 2} | changes)


def written(folder, name="r"):
    found = tomllib.loads((folder / name / "config.toml").read_text(encoding="utf-8"))
    return found["precision"], found["compile"]


@pytest.fixture
def new_gpu(monkeypatch):
    monkeypatch.setattr(precision, "compute_capability", lambda device: (9, 0))
    with counting.counted() as seen:
        yield seen


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        ([], (None, "auto")),
        (["--compile"], (True, "auto")),
        (["--no-compile", "--precision", "float32"], (False, "float32")),
        (["--compile", "auto", "--precision", "auto"], (None, "auto")),
        (["--compile=auto"], (None, "auto")),
        (["--compile", "--exact"], (True, "auto")),
    ],
)
def test_the_flags(argv, wanted):
    found = cli.parse(argv)
    assert (found.compile, found.precision) == wanted
    assert cli.build({"compile": cli.flatten(found)["compile"]}).compile is wanted[0]
    text = cli.to_toml(found)
    assert tomllib.loads(text)["compile"] == ("auto" if wanted[0] is None else wanted[0])


@pytest.mark.parametrize("argv", [["--compile", "yes"], ["--no-compile", "auto"], ["--compile=1"]])
def test_what_else_is_said_to_it_is_refused(argv):
    with refuses(ConfigError, argv[0].partition("=")[0], "--compile auto"):
        cli.parse(argv)


def test_in_python_and_in_a_file(tmp_path):
    assert [Config(compile=value).compile for value in (True, False, "auto")] == [True, False, None]
    with pytest.raises(ConfigError, match="compile is 'yes': it must be true or false"):
        Config(compile="yes")
    (tmp_path / "a.toml").write_text('compile = true\nprecision = "auto"\n', encoding="utf-8")
    assert cli.parse(["--config", str(tmp_path / "a.toml")]).compile is True


def test_on_a_cpu_it_is_float32_and_eager(tmp_path, capfd):
    lockstep.train(settings(tmp_path), task())
    assert written(tmp_path) == ("float32", False)
    assert "device default" not in capfd.readouterr().err


def test_new_gpu_has_bf16_and_compilation_in_one_line(tmp_path, capfd, new_gpu):
    lockstep.train(settings(tmp_path), task())
    assert written(tmp_path) == ("bf16", True)
    assert capfd.readouterr().err.count(LINE) == 1
    assert new_gpu.captured


@pytest.mark.parametrize(
    ("given", "wanted", "line"),
    [
        ({"precision": "float32"}, ("float32", True), "device default: --compile; to turn it off: --no-compile"),
        ({"compile": False}, ("bf16", False), "device default: --precision bf16; to turn it off: --precision float32"),
        ({"precision": "float64", "compile": False}, ("float64", False), ""),
    ],
)
def test_what_is_given_wins(tmp_path, capfd, new_gpu, given, wanted, line):
    lockstep.train(settings(tmp_path, **given), task())
    assert written(tmp_path) == wanted
    said = capfd.readouterr().err
    assert line in said
    assert said.count("device default") == bool(line)


@pytest.mark.parametrize("capability", [(7, 5), None])
def test_an_older_device_has_neither(tmp_path, monkeypatch, capability):
    monkeypatch.setattr(precision, "compute_capability", lambda device: capability)
    lockstep.train(settings(tmp_path), task())
    assert written(tmp_path) == ("float32", False)


def test_a_run_keeps_what_it_was_begun_with_on_another_device(tmp_path, capfd, monkeypatch):
    lockstep.train(settings(tmp_path, stop_at=1), task())
    monkeypatch.setattr(precision, "compute_capability", lambda device: (9, 0))
    lockstep.train(settings(tmp_path), task())
    assert written(tmp_path) == ("float32", False)
    line = "as the run was started: --precision float32 --no-compile; the default of this device is --precision bf16"
    assert line in capfd.readouterr().err
    with counting.counted():
        lockstep.train(settings(tmp_path, "new", stop_at=1), task())
        monkeypatch.undo()
        lockstep.train(settings(tmp_path, "new"), task())
    assert written(tmp_path, "new") == ("bf16", True)
    with pytest.raises(ResumeError, match=r"precision bf16 \(now float32\)"):
        lockstep.train(settings(tmp_path, "new", precision="float32"), task())


def test_a_run_without_a_word_about_it_was_begun_without(tmp_path, monkeypatch):
    """As one that is older than these defaults."""
    lockstep.train(settings(tmp_path, stop_at=1, precision="float32", compile=False), task())
    read = checkpoint.read_state

    def older(path):
        return {name: value for name, value in read(path).items() if name != "compile"}

    monkeypatch.setattr(precision, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(checkpoint, "read_state", older)
    lockstep.train(settings(tmp_path), task())
    assert written(tmp_path) == ("float32", False)


def on_unequal(world, folder):
    precision.compute_capability = lambda device: [(9, 0), (7, 5)][world.rank]
    lockstep.train(settings(folder, "unequal"), task(), world)
    with counting.counted():
        precision.compute_capability = lambda device: (8, 0)
        lockstep.train(settings(folder, "equal", exact=True), task(), world)
    return [written(folder, name) for name in ("unequal", "equal")]


def test_the_weakest_device_of_all_ranks_decides(tmp_path):
    assert run(on_unequal, 2, tmp_path, timeout=120.0) == [[("float32", False), ("bf16", True)]] * 2


# what cannot be compiled


class NoCompiler(Exception):
    pass


def failing(graph, inputs, **options):
    raise NoCompiler("no compiler here\nand more")


@pytest.fixture
def broken(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(precision, "HOW", {"backend": failing})
    yield
    torch._dynamo.reset()


def test_required_compilation_that_fails_is_refused_early(tmp_path, broken):
    with refuses(ConfigError, "--compile", "rank 0", "NoCompiler", "no compiler here"):
        lockstep.train(settings(tmp_path, compile=True), task())
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize("scope", ["whole", "blocks"])
def test_where_it_may_fail_the_bits_are_those_of_an_eager_run(tmp_path, broken, capfd, monkeypatch, scope):
    monkeypatch.setattr(precision, "compute_capability", lambda device: (9, 0))
    lockstep.train(settings(tmp_path, scope, compile_scope=scope), task())
    assert names(capfd.readouterr().err, "--compile auto", "rank 0", "NoCompiler", "no compiler here")
    assert written(tmp_path, scope) == ("bf16", False)
    lockstep.train(settings(tmp_path, "eager", precision="bf16", compile=False), task())
    assert (
        len({checkpoint.fingerprint(checkpoint.newest(tmp_path / name, say=print)) for name in (scope, "eager")}) == 1
    )


def on_one(world, folder):
    """Rank 1 alone has no compiler."""
    precision.compute_capability = lambda device: (9, 0)
    precision.HOW = {"backend": "eager" if world.rank == 0 else failing}
    found = []
    for engine in ("ddp", "zero"):
        lockstep.train(settings(folder, engine, engine=engine, exact=True), task(), world)
        found.append((written(folder, engine), checkpoint.fingerprint(checkpoint.newest(folder / engine, say=print))))
    try:
        lockstep.train(settings(folder, "must", compile=True), task(), world)
    except ConfigError as error:
        found.append(str(error))
    return found


def test_where_one_rank_cannot_none_does(tmp_path):
    lockstep.train(settings(tmp_path, "eager", precision="bf16", compile=False, exact=True), task())
    wanted = (("bf16", False), checkpoint.fingerprint(checkpoint.newest(tmp_path / "eager", say=print)))
    for found in run(on_one, 2, tmp_path, timeout=120.0):
        assert found[:2] == [wanted] * 2
        assert names(found[2], "--compile", "rank 1", "NoCompiler", "no compiler here")


def test_a_trial_leaves_nothing_behind(tmp_path):
    """The random numbers, buffers and modes after it are those of a run that was never tried: aot_eager has eager's."""
    kinds = {"precision": "float32", "max_steps": 3}

    class Normed(Ragged):
        def model(self):
            inner = super().model()
            layers = torch.nn.Flatten(0, 1), torch.nn.BatchNorm1d(16), torch.nn.Unflatten(0, (-1, 12))
            inner.blocks.append(torch.nn.Sequential(*layers))
            return inner

    lockstep.train(settings(tmp_path, "eager", compile=False, **kinds), Normed(dropout=0.3, dtype=torch.float32))
    torch._dynamo.reset()
    before = precision.HOW
    precision.HOW = {"backend": "eager"}
    try:
        lockstep.train(settings(tmp_path, "compiled", compile=True, **kinds), Normed(dropout=0.3, dtype=torch.float32))
    finally:
        precision.HOW = before
    one, two = (checkpoint.fingerprint(checkpoint.newest(tmp_path / name, say=print)) for name in ("eager", "compiled"))
    assert one == two


@pytest.mark.parametrize("value", ["1", "0"])
def test_cuda_graphs_are_refused(tmp_path, monkeypatch, value, new_gpu):
    monkeypatch.setenv("TORCHINDUCTOR_CUDAGRAPHS", value)
    if value == "1":
        with pytest.raises(ConfigError, match="--compile .*TORCHINDUCTOR_CUDAGRAPHS=1"):
            lockstep.train(settings(tmp_path, compile=True), task())
    else:
        lockstep.train(settings(tmp_path, compile=True), task())
