"""SIGKILL at moments nobody chose: three in the ordinary tests, twenty with `make kills`."""

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import aphq

from .runs import forked, pixels, sha256, short

Build = Callable[..., nn.Module]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
KILLS = int(os.environ.get("APHQ_KILLS", "3"))
SEED = int(os.environ.get("APHQ_KILL_SEED", "0")) or random.SystemRandom().randrange(1, 2**31)
AGAIN = 0.3  # the chance that the next life is killed as well


def run(model: nn.Module, out: Path) -> aphq.Run:
    recipe = short("w4a4", "best", joint_tuning__steps=4) if KILLS > 3 else short("w4a4")
    return aphq.quantize(model, recipe, pixels(), out=out, device="cpu")


def killed_after(seconds: float, work: Callable[[], object]) -> bool:
    """Run `work` in a process of its own and kill that; False if it was done before."""
    child = forked(work)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.WIFEXITED(status)
            assert os.WEXITSTATUS(status) == 0, "the run failed by itself"
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_a_run_killed_at_any_moment_ends_with_the_same_bits(
    family: str, vit: Build, swin: Build, tmp_path: Path
) -> None:
    model = (vit if family == "vit" else swin)()
    started = time.monotonic()
    assert not killed_after(600, lambda: run(model, tmp_path / "whole"))
    length = time.monotonic() - started
    expected = sha256(tmp_path / "whole" / "model.safetensors")
    rng = random.Random(f"{SEED} {family}")
    count = KILLS - KILLS // 3 if family == "vit" else KILLS // 3
    kills, lives = 0, 0
    while kills < count:
        out = tmp_path / f"run{lives}"
        lives += 1
        moment = rng.uniform(0.0, length)
        while killed_after(moment, lambda out=out: run(model, out)):  # type: ignore[misc]
            kills += 1
            print(f"APHQ_KILL_SEED={SEED} {family}: kill {kills} after {moment:.2f} of {length:.2f} s, {_state(out)}")
            if rng.random() > AGAIN:
                break
            moment = rng.uniform(0.0, length)
        run(model, out)
        assert sha256(out / "model.safetensors") == expected, f"repeat it with APHQ_KILL_SEED={SEED}"
        assert not list(out.rglob("*.tmp")), "nothing half-written stays"


def _state(out: Path) -> str:
    done = [file.parent.name for file in sorted(out.rglob("checkpoints/*/*.safetensors"), key=os.path.getmtime)]
    return f"{len(done)} checkpoints, the last of {done[-1]}" if done else "no checkpoint yet"
