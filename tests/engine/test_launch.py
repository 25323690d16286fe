import pytest
import torch

from aphq.engine.launch import NEEDED, is_first_process, is_shared
from aphq.engine.ranks import Ranks


@pytest.mark.parametrize(
    ("environment", "shared", "first"),
    [
        ({}, False, True),
        ({"RANK": "1"}, False, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False, True),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, True, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}, True, True),
        ({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}, False, True),
    ],
)
def test_only_processes_that_can_meet_share_a_run(
    environment: dict[str, str], shared: bool, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NEEDED:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_shared(), is_first_process()) == (shared, first)
    if not shared:
        assert Ranks.join(torch.device("cpu")).first, "whoever is alone works, and speaks"
