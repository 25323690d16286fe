import gc
from pathlib import Path

import pytest
import torch

from aphq.engine.store import Activations, Store, free_host_bytes, push
from aphq.errors import RunError

CPU = torch.device("cpu")
ROWS = torch.randn(10, 3, 4, generator=torch.Generator().manual_seed(0))
BYTES = ROWS.numel() * 4


def store(host_bytes: int | None, folder: Path | None = None) -> Store:
    return Store(CPU, gpu_bytes=0, host_bytes=host_bytes, folder=folder)


def filled(into: Store) -> Activations:
    rows = into.allocate(tuple(ROWS.shape))
    rows.data.copy_(ROWS)
    return rows


@pytest.mark.parametrize(("budget", "tier"), [(None, "host"), (BYTES, "host"), (BYTES - 1, "disk"), (0, "disk")])
def test_rows_go_where_there_is_room_and_come_back_equal(tmp_path: Path, budget: int | None, tier: str) -> None:
    rows = filled(store(budget, tmp_path))
    assert rows.tier == tier
    assert len(rows) == 10
    assert torch.equal(rows[2:5], ROWS[2:5])
    index = torch.tensor([7, 0, 7, 3])
    assert torch.equal(rows[index], ROWS[index])
    assert torch.equal(rows[0:100], ROWS)


def test_what_does_not_fit_any_more_goes_to_disk_and_space_is_given_back(tmp_path: Path) -> None:
    space = store(2 * BYTES, tmp_path)
    first, second, third = (filled(space) for _ in range(3))
    assert [rows.tier for rows in (first, second, third)] == ["host", "host", "disk"]
    assert space.used == {"host": 2 * BYTES, "disk": BYTES}
    del second, third
    gc.collect()
    assert space.used == {"host": BYTES, "disk": 0}
    assert space.peak == {"host": 2 * BYTES, "disk": BYTES}
    assert filled(space).tier == "host"
    assert torch.equal(first[0:10], ROWS)


def test_a_gpu_that_another_process_filled_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    space = store(10 * BYTES)
    space.free = {"gpu": 10 * BYTES, **space.free}
    space.used["gpu"] = space.peak["gpu"] = 0
    first = filled(space)
    empty, asked = torch.empty, []

    def full(*shape: object, **options: object) -> torch.Tensor:
        asked.append(shape)
        if len(asked) == 1:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return empty(*shape, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(torch, "empty", full)
    second, third = filled(space), filled(space)
    assert [rows.tier for rows in (first, second, third)] == ["gpu", "host", "host"]
    assert len(asked) == 3, "it is not asked again"
    assert space.used["gpu"] == BYTES
    assert torch.equal(second[0:10], ROWS)


def test_room_shrinks_with_what_is_kept_and_comes_back(tmp_path: Path) -> None:
    space = store(3 * BYTES, tmp_path)
    assert space.room("host") == 3 * BYTES
    first, second = filled(space), filled(space)
    assert first.nbytes == BYTES
    assert space.room("host") == BYTES
    large = space.allocate((2, *ROWS.shape))
    assert large.tier == "disk"
    assert large.nbytes == 2 * BYTES
    assert space.room("host") == BYTES, "what lies on disk takes no room here"
    del first, second
    gc.collect()
    assert space.room("host") == 3 * BYTES


def test_a_tier_that_is_not_there_has_no_room() -> None:
    space = store(BYTES)
    assert space.room("gpu") == 0
    assert space.room("disk") == 0, "nobody has measured the disk"


def test_what_outgrows_its_memory_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        crowded = store(0, tmp_path)
        rows = [filled(crowded), filled(crowded)]
    assert all(r.tier == "disk" for r in rows)
    assert caplog.text.count("some are kept on disk, which is slower") == 1
    caplog.clear()
    filled(store(None))
    assert not caplog.text


def test_rows_on_disk_leave_no_file_behind(tmp_path: Path) -> None:
    rows = filled(store(0, tmp_path))
    assert not list(tmp_path.iterdir())
    assert torch.equal(rows[0:10], ROWS)


def test_a_disk_that_cannot_hold_the_rows_says_so_at_once(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"cannot cache .* GB of activations in .*nowhere.*fewer calibration images"):
        store(0, tmp_path / "nowhere").allocate((10, 10))
    with pytest.raises(RunError, match=r"cannot cache 4000000\.0 GB"):
        store(0, tmp_path).allocate((10**15,))


@pytest.mark.parametrize("batch", [1, 3, 10, 64])
@pytest.mark.parametrize("budget", [None, 0])
def test_pushing_applies_a_step_to_every_row_in_order(tmp_path: Path, batch: int, budget: int | None) -> None:
    sizes: list[int] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        return x.flatten(1) * 2

    out = push(step, filled(store(None)), store(budget, tmp_path), batch)
    assert torch.equal(out[0:10], ROWS.flatten(1) * 2)
    assert sum(sizes) == 10
    assert max(sizes) == min(batch, 10)


def test_pushing_keeps_no_gradients(tmp_path: Path) -> None:
    layer = torch.nn.Linear(4, 2)
    out = push(layer, filled(store(None)), store(None), 4)
    assert not out[0:10].requires_grad


def test_the_system_has_memory() -> None:
    assert free_host_bytes() > 2**20
