import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import aphq
from aphq.engine.ranks import Ranks
from aphq.errors import RecipeError
from aphq.quant.drop import Drop

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import torch
import aphq
from tests.engine.test_ranks import model, recipe
from tests.runs import pixels

torch.set_num_threads(1)
aphq.quantize(model(), recipe(sys.argv[2]), pixels(16), out=sys.argv[1], device="cpu")
"""


def model() -> torch.nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(0)
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10).eval()


def recipe(importance: str) -> aphq.Recipe:
    from ..runs import short

    return short("w3a3", calibration__batch=4, steps=10, importance__kind=importance)


def run(folder: Path, importance: str, processes: int) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    script = folder.parent / "program.py"
    script.write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *launcher, str(script), str(folder), importance]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("importance", ["fisher", pytest.param("aph", marks=pytest.mark.slow)])
def test_two_processes_end_where_one_does(tmp_path: Path, importance: str) -> None:
    """Sums are taken in another order, nothing else differs: the same draws, the same drops."""
    run(tmp_path / "one", importance, 1)
    run(tmp_path / "two", importance, 2)
    curves = []
    for name in ("one", "two"):
        events = [json.loads(line) for line in (tmp_path / name / "events.jsonl").read_text().splitlines()]
        curves.append({(e["stage"], e["unit"]): torch.tensor(e["losses"]) for e in events if "losses" in e})
        assert [e["event"] for e in events].count("finished") == 1, "one process writes"
    assert set(curves[0]) == set(curves[1])
    for key, losses in curves[0].items():
        torch.testing.assert_close(curves[1][key], losses, rtol=2e-2 if importance == "fisher" else 0.2, atol=1e-6)
    one, two = (aphq.load(tmp_path / name) for name in ("one", "two"))
    if importance == "fisher":  # aph is round-off noise, which another order of sums changes
        weights = [
            torch.cat([w.flatten() for n, w in m.state_dict().items() if n.endswith(".weight")]) for m in (one, two)
        ]
        assert torch.isclose(*weights, rtol=1e-3, atol=1e-5).float().mean() > 0.99


def test_alone_nothing_is_said_and_nothing_changes() -> None:
    ranks, x = Ranks(), torch.ones(3)
    assert ranks.first
    assert ranks.owns(7)
    assert ranks.share_of(5) == slice(0, 5)
    assert ranks.add([x])[0] is x
    assert ranks.spread(x, 0) is x
    assert ranks.decide(True)
    assert not ranks.decide(False)
    assert ranks.agree_that(True)
    ranks.require_same("images", "abc")
    ranks.leave()


def test_a_cluster_that_only_sets_the_world_size_is_not_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Ranks.join(torch.device("cpu")).count == 1


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    assert Ranks(1, 4).share_of(32) == slice(8, 16)
    with pytest.raises(RecipeError, match="32 images per step cannot be shared evenly by 3 processes"):
        Ranks(1, 3).share_of(32)


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_processes_together_drop_what_one_would(interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aphq.kernels.interpreted", interpreted)
    step, masks = torch.tensor([3]), []
    for rank in range(2):
        torch.manual_seed(5)
        masks.append(Drop(0.5, 9, step, rank, 2).kept(torch.empty(4, 6, 5)))
    torch.manual_seed(5)
    assert torch.equal(torch.cat(masks), Drop(0.5, 9, step).kept(torch.empty(8, 6, 5)))
