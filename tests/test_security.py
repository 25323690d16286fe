"""What SECURITY.md promises: no network unless asked, nothing unpickled, no code from files."""

import ast
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import aphq
from aphq.api import evaluate
from aphq.demo.assets import load_assets
from aphq.demo.run import demo_recipe
from aphq.export import export
from aphq.report import write_report

from .runs import forked, pixels, short, shortened

SOURCE = Path(aphq.__file__).parent
NETWORK = {"socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "urllib.Request"}
FORBIDDEN_IMPORTS = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "urllib", "requests", "socket"}

FORBIDDEN_CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "yaml.load",
    "yaml.unsafe_load",
    "torch.hub.load",
}


def without_network(work: Callable[[], object]) -> None:
    """Run in a child in which the first attempt at a connection ends the process."""

    def guarded() -> None:
        torch.set_num_threads(1)
        sys.addaudithook(lambda event, _: os._exit(77) if event in NETWORK else None)
        work()

    _, status = os.waitpid(forked(guarded), 0)
    assert os.waitstatus_to_exitcode(status) != 77, "it tried to reach the network"
    assert os.waitstatus_to_exitcode(status) == 0


def test_the_guard_works() -> None:
    with pytest.raises(AssertionError, match="tried to reach the network"):
        without_network(lambda: socket.create_connection(("127.0.0.1", 9), timeout=1))


def test_quantize_evaluate_export_and_report_stay_at_home(tiny_vit: nn.Module, tmp_path: Path) -> None:
    def work() -> None:
        images, labels = pixels(), torch.arange(16) % 10
        run = aphq.quantize(tiny_vit, short(), images, val=[(images, labels)], out=tmp_path / "run", device="cpu")
        evaluate(tmp_path / "run", [(images, labels)], device="cpu")
        write_report([tmp_path / "run"])
        run.export("torch", out=tmp_path / "model")

    without_network(work)


def test_an_onnx_export_stays_at_home(tiny_vit: nn.Module, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    aphq.quantize(tiny_vit, short(effort="fast"), pixels(), out=tmp_path / "run", device="cpu")
    without_network(lambda: export(tmp_path / "run", "onnx"))


def test_the_demo_stays_at_home(tmp_path: Path) -> None:
    def work() -> None:
        assets = load_assets()
        recipe = shortened(demo_recipe("w4a4"), {"steps": 1})
        options = {"preprocessing": assets.preprocessing, "out": tmp_path / "run", "device": "cpu"}
        aphq.quantize(assets.model, recipe, assets.calibration[:16], **options)  # type: ignore[arg-type]

    without_network(work)


def modules() -> Iterator[tuple[Path, ast.Module]]:
    for file in sorted(SOURCE.rglob("*.py")):
        yield file.relative_to(SOURCE), ast.parse(file.read_text())


def test_nothing_in_the_package_can_unpickle_or_run_what_it_reads() -> None:
    """Read off the source, so that a new call cannot slip in untested."""
    found = []
    for file, tree in modules():
        for node in ast.walk(tree):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name.split(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [(node.module or "").split(".")[0]]
            found += [f"{file}: import {name}" for name in names if name in FORBIDDEN_IMPORTS]
            if isinstance(node, ast.Call):
                problem = _dangerous(ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords})
                found += [f"{file}:{node.lineno}: {problem}"] if problem else []
    assert found == []


def _dangerous(name: str, options: dict[str | None, str]) -> str | None:
    if name in FORBIDDEN_CALLS:
        return name
    if name == "torch.load" and options.get("weights_only") != "True":
        return "torch.load without weights_only=True"
    if name == "np.load" and options.get("allow_pickle") != "False":
        return "np.load without allow_pickle=False"
    return None


def test_the_reading_of_the_source_can_fail() -> None:
    assert _dangerous("torch.load", {}) is not None
    assert _dangerous("torch.load", {"weights_only": "False"}) is not None
    assert _dangerous("torch.load", {"weights_only": "True"}) is None
    assert "import" in "".join(ast.unparse(tree)[:10_000] for _, tree in modules())
