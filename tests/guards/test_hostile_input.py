"""Hostile input that no other test has: strangers at the meeting point, and files and configs that try to run code.

The list of all eighteen, with the test of each, is in docs/inside/reliability.md.
"""

import os
import pickle
import socket
import subprocess
import threading
import zipfile

import pytest
import warm
from ranks import run
from shell import free_port

from lockstep import checkpoint
from lockstep.config import cli
from lockstep.config.secrets import printable
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.logging.log import close_log, open_log
from lockstep.training.start.named_task import make_task


class Payload:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("name", ["model.pt", "rank-00000.safetensors", "manifest.json", "state.json", ".metadata"])
def test_a_pickle_is_never_run(tmp_path, name):
    canary, folder = tmp_path / "canary", tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    (folder / name).write_bytes(pickle.dumps(Payload(canary)))
    said = []
    assert checkpoint.newest(tmp_path / "run", say=said.append) is None
    assert said
    with pytest.raises(CheckpointError):
        checkpoint.load(folder, {}, None)
    assert not canary.exists()


def test_a_zip_in_the_place_of_tensors_is_not_opened(tmp_path):
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "rank-00000.safetensors", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("data", bytes(50_000_000))
    assert checkpoint.newest(tmp_path / "run", say=lambda line: None) is None


def test_task_in_a_config_is_a_class_in_a_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('task = "os:system"')
    with pytest.raises(ConfigError, match="--task 'os:system': no such file"):
        make_task(cli.parse(["--config", str(path)]), print)


@pytest.mark.parametrize(
    "text",
    [
        "lr = nan",
        'lr = "1e-3"',
        "lr = 1\nlr = 2",
        'model = "!!python/object/apply:os.system"',
        "[[[[[",
        "a = " + "[" * 5000 + "]" * 5000,
    ],
)
def test_a_config_is_data_and_wrong_data_is_one_line(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        cli.parse(["--config", str(path)])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../../x", "$(touch canary)/..", "a\nb", "x" * 5000, "", ".hidden", "a\x1b[31m"])
def test_a_runs_name_cannot_leave_its_folder(name):
    with pytest.raises(ConfigError, match="--experiment-name"):
        cli.parse(["--experiment-name", name])


def _strangers(world):
    """All ranks agree while strangers talk to the meeting point."""
    port = int(os.environ["MASTER_PORT"])
    stop = threading.Event()

    def talk():
        while not stop.is_set():
            for words in (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(200), b""):
                try:
                    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger:
                        stranger.sendall(words)
                except OSError:
                    pass

    thread = threading.Thread(target=talk)
    if world.rank == 0:
        thread.start()
    found = [sum(world.gather(number)) for number in range(50)]
    stop.set()
    if world.rank == 0:
        thread.join()
    return found


def test_strangers_at_the_meeting_point_are_ignored():
    assert run(_strangers, 2) == [[2 * number for number in range(50)]] * 2


def test_the_meeting_point_of_a_node_is_on_loopback_alone(tmp_path):
    code = (
        "from lockstep.distributed.world import World; import os; w = World.join('cpu', 20.0)"
        "; print(open('/proc/net/tcp').read())"
    )
    code += "; print(open('/proc/net/tcp6').read()) if os.path.exists('/proc/net/tcp6') else None; w.leave()"
    port = free_port()
    environ = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    done = subprocess.run([warm.python(), "-c", code], env=environ, capture_output=True, text=True, check=True)
    mine = [line.split()[1] for line in done.stdout.splitlines() if f":{port:04X} " in line and " 0A " in line]
    assert mine == [f"0100007F:{port:04X}"]


def test_escapes_in_an_error_are_written_out(tmp_path, capsys):
    logger = open_log(tmp_path, 0)
    logger.error("%s", LockstepError("a name \x1b[2J\nwith escapes"))
    close_log()
    for text in (capsys.readouterr().err, (tmp_path / "logs" / "rank-00000.log").read_text()):
        assert "\x1b" not in text
        assert text.count("\n") == 1
    assert printable("\x1b[2J") == "\\x1b[2J"
