"""The minor version of Lightning before the one that the other tests have: a few modules train under it as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("lightning")

HERE = Path(__file__).parent
PREVIOUS = Path(sys.prefix) / "lightning-2.5.6"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")

pytestmark = pytest.mark.skipif(not PREVIOUS.exists(), reason="`make test` installs Lightning 2.5 beside the other")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What modules of each package came to: in one process, which is seconds sooner than two."""
    script = [sys.executable, str(HERE / "lightning_previous.py"), str(tmp_path_factory.mktemp("previous")), *PACKAGES]
    paths = os.pathsep.join([str(PREVIOUS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        script, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(PACKAGES, map(json.loads, lines), strict=True))


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_train_as_under_lightning_2_5(package, found):
    mine = found[package]
    assert mine["version"] == "2.5.6"
    for what in ("automatic", "manual"):
        assert len(mine[what]["ours"]) == 16
        np.testing.assert_allclose(mine[what]["ours"], mine[what]["theirs"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(mine["rates"]["ours"], mine["rates"]["theirs"], rtol=1e-12)
    assert mine["logs"]["ours"] == mine["logs"]["theirs"]
    assert mine["callbacks"] == ["val_loss:min", 5, 2]
