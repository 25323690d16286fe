import errno
import hashlib
import logging
import os
import pickle
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from aphq.errors import ModelError
from aphq.models import architecture_of
from aphq.models.loading import load_model, model_fingerprint, read_checkpoint

NAME = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 32, "depth": 1}
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(NAME, num_classes=7, **SMALL).eval()


def same(a: nn.Module, b: nn.Module) -> bool:
    x = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        return torch.equal(a(x), b(x))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt", ".bin"])
def test_local_weights_with_their_own_number_of_classes(source: nn.Module, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    save_file(source.state_dict(), file) if suffix == ".safetensors" else torch.save(source.state_dict(), file)
    model = load_model(NAME, file, **SMALL)
    assert model.num_classes == 7
    assert not model.training
    assert same(model, source)


def prefixed(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"module.{name}": tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: {"model": s, "epoch": 3},
        lambda s: {"state_dict": s, "optimizer": {"state": {}, "lr": 0.1}},
        lambda s: {"state_dict": {k: torch.zeros_like(t) for k, t in s.items()}, "state_dict_ema": s},
        lambda s: {"model": prefixed(s), "model_ema": None},
        prefixed,
    ],
)
def test_checkpoints_as_trainers_leave_them(source: nn.Module, tmp_path: Path, wrap: Callable[..., Any]) -> None:
    file = tmp_path / "checkpoint.pth"
    torch.save(wrap(source.state_dict()), file)
    assert same(load_model(NAME, file, **SMALL), source)


def test_half_precision_becomes_float32(source: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "half.safetensors"
    save_file({k: t.half() for k, t in source.state_dict().items()}, file)
    model = load_model(NAME, file, **SMALL)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    for mine, original in zip(model.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(mine, original, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s | {"blocks.0.attn.qkv.weight": torch.zeros(5, 5)},
            r"blocks.0.attn.qkv.weight \(5, 5\) instead of \(576, 192\)",
        ),
        (lambda s: {k: t for k, t in s.items() if k != "norm.bias"}, "missing: norm.bias"),
        (lambda s: s | {"extra.bias": torch.zeros(1)}, "unexpected: extra.bias"),
    ],
)
def test_weights_that_do_not_fit_name_the_tensor(
    source: nn.Module, tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(change(source.state_dict()), file)
    with pytest.raises(ModelError, match=f"weights.safetensors does not fit this model.*{message}"):
        load_model(NAME, file, **SMALL)


def test_another_number_of_classes_than_asked_for_names_the_head(source: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), file)
    with pytest.raises(ModelError, match=r"head.weight \(7, 192\) instead of \(1000, 192\)"):
        load_model(NAME, file, num_classes=1000, **SMALL)


class Bomb:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize("save", [torch.save, lambda value, file: file.write_bytes(pickle.dumps(value, protocol=2))])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path: Path, save: Callable[..., Any]) -> None:
    file, target = tmp_path / "bomb.pth", tmp_path / "executed"
    save({"model": Bomb(target)}, file)
    with pytest.raises(ModelError, match=r"bomb.pth holds more than tensors.*safetensors"):
        load_model(NAME, file, **SMALL)
    assert not target.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("empty.pth", b""),
        ("empty.safetensors", b""),
        ("garbage.pth", b"garbage"),
        ("garbage.safetensors", b"garbage" * 10),
        ("truncated.pth", None),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, content: bytes | None) -> None:
    file = tmp_path / name
    if content is None:
        torch.save({"a": torch.zeros(1000)}, file)
        content = file.read_bytes()[:1000]
    file.write_bytes(content)
    with pytest.raises(ModelError, match=name):
        read_checkpoint(file)


@pytest.mark.parametrize("value", [{}, [1, 2], {"model": {"epoch": 1}}, torch.zeros(3)])
def test_files_without_a_state_dict_are_refused(tmp_path: Path, value: Any) -> None:
    torch.save(value, tmp_path / "other.pth")
    with pytest.raises(ModelError, match=r"other.pth does not hold a state_dict"):
        read_checkpoint(tmp_path / "other.pth")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no weights file .*nowhere.pth"):
        load_model(NAME, tmp_path / "nowhere.pth")


def test_a_folder_with_a_models_name_does_not_hide_the_model(
    source: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    assert same(load_model(NAME, "weights.pth", **SMALL), source)
    with pytest.raises(ModelError, match="holds no model"):
        load_model(f"./{NAME}")


def test_an_unknown_name_proposes_the_nearest() -> None:
    with pytest.raises(ModelError, match="no model 'deit_smal_patch16_224': did you mean 'deit_small_patch16_224'"):
        load_model("deit_smal_patch16_224")


def test_an_unknown_tag_and_bad_arguments_are_model_errors(source: nn.Module, tmp_path: Path) -> None:
    file = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), file)
    with pytest.raises(ModelError, match=r"cannot create 'vit_tiny_patch16_224.nope': Invalid pretrained tag"):
        load_model(f"{NAME}.nope", file, **SMALL)
    with pytest.raises(ModelError, match=r"cannot create 'vit_tiny_patch16_224' with .*'colour'"):
        load_model(NAME, file, colour="red")


@pytest.mark.parametrize(
    ("argument", "why"),
    [({"drop_rate": 2.0}, "probability"), ({"embed_dim": -192}, "negative"), ({"patch_size": 0}, "zero")],
)
@pytest.mark.parametrize("local", [True, False], ids=["local", "published"])
def test_arguments_that_make_no_model_are_model_errors(
    argument: dict[str, Any], why: str, local: bool, source: nn.Module, tmp_path: Path
) -> None:
    """Whatever timm raises of them, and before anything is fetched."""
    file = tmp_path / "weights.safetensors"
    save_file(source.state_dict(), file)
    with pytest.raises(ModelError, match=rf"timm cannot create '{NAME}' with .*{why}"):
        load_model(NAME, file if local else None, **{**SMALL, **argument})


LIBRARIES = ("library", "maker", "name")


def instead_of_fetching(
    monkeypatch: pytest.MonkeyPatch, library: Any, maker: str, fetch: Callable[[], nn.Module]
) -> None:
    """Models without weights are made as ever; asked for published ones, the library does `fetch`."""
    make = getattr(library, maker)

    def made(name: str, pretrained: bool = False, weights: str | None = None, **more: Any) -> nn.Module:
        return fetch() if pretrained or weights else make(name, **more)

    monkeypatch.setattr(library, maker, made)


@pytest.mark.parametrize(LIBRARIES, [(timm, "create_model", NAME), (torchvision.models, "get_model", "vit_b_16")])
@pytest.mark.parametrize(
    ("problem", "says"),
    [
        (ConnectionError("no route"), r"cannot get pretrained weights for '{}.*network.*--weights"),
        (HTTPError("http://x", 503, "Unavailable", Message(), None), "cannot get pretrained weights for '{}.*network"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            r"cannot keep the pretrained weights for '{}.*No space left",
        ),
    ],
    ids=["connection", "status", "disk"],
)
def test_a_download_that_fails_says_what_to_do(
    library: Any, maker: str, name: str, problem: OSError, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> nn.Module:
        raise problem

    instead_of_fetching(monkeypatch, library, maker, fail)
    with pytest.raises(ModelError, match=says.format(name)):
        load_model(name)


@pytest.mark.parametrize(
    LIBRARIES,
    [(timm, "create_model", "resnet10t"), (torchvision.models, "get_model", "shufflenet_v2_x0_5")],
)
def test_a_model_that_no_adapter_knows_is_refused_before_its_weights_are_fetched(
    library: Any, maker: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    instead_of_fetching(monkeypatch, library, maker, lambda: pytest.fail("weights were fetched"))
    with pytest.raises(ModelError, match=r"cannot quantize a \w+ .*supported: .*VisionTransformer"):
        load_model(name)


def test_a_model_without_published_weights_is_no_matter_of_the_network() -> None:
    name = "vit_small_patch16_36x1_224"
    with pytest.raises(ModelError, match=rf"timm has no published weights of '{name}'.*--weights"):
        load_model(name)


def test_a_download_is_announced(
    source: nn.Module, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    instead_of_fetching(monkeypatch, timm, "create_model", lambda: source)
    with caplog.at_level(logging.INFO, "aphq"):
        load_model(NAME)
    assert f"{NAME}: fetching its published weights" in caplog.text
    assert "--weights" in caplog.text


def test_the_fingerprint_tells_models_apart(vit: Callable[..., Any]) -> None:
    def fingerprint(model: nn.Module) -> str:
        return model_fingerprint(model, architecture_of(model))

    model = vit()
    first = fingerprint(model)
    assert fingerprint(vit()) == first
    model.blocks[1].mlp.fc2.weight[3, 4] += 1e-6
    assert fingerprint(model) != first
    assert fingerprint(vit(act_layer=nn.ReLU)) != first, "the same tensors, another forward"


def named_by_hash(state: dict[str, Tensor], folder: Path, digits: int = 8) -> Path:
    file = folder / "weights.pth"
    torch.save(state, file)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:digits]
    return file.rename(folder / f"vit_tiny-{digest}.pth")


@pytest.mark.parametrize("digits", [8, 64])
def test_a_file_that_carries_its_hash_is_checked(source: nn.Module, tmp_path: Path, digits: int) -> None:
    file = named_by_hash(source.state_dict(), tmp_path, digits)
    assert same(load_model(NAME, file, **SMALL), source)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(ModelError, match=r"vit_tiny-\w+.pth has the hash .* the download is damaged or was changed"):
        load_model(NAME, file, **SMALL)


@pytest.mark.parametrize("name", ["run-20240115.pth", "checkpoint-10000000.pth"])
def test_a_date_or_a_count_is_no_hash(
    source: nn.Module, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    torch.save(source.state_dict(), tmp_path / name)
    assert same(load_model(NAME, tmp_path / name, **SMALL), source)
    assert "unless the number is a date" in caplog.text


def test_downloads_are_checked_and_not_unpickled(source: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def create(*_: Any, **__: Any) -> nn.Module:
        seen["forced"] = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
        seen["checked"] = timm.models._builder._CHECK_HASH
        return source

    monkeypatch.setattr(timm, "create_model", create)
    load_model(NAME)
    assert seen == {"forced": "1", "checked": True}
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ


def test_torch_keeps_to_tensors_when_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a caller says: what `load_model` relies on while timm downloads."""
    torch.save({"model": Bomb(tmp_path / "executed")}, tmp_path / "bomb.pth")
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")
    with pytest.raises(pickle.UnpicklingError):
        torch.load(tmp_path / "bomb.pth", weights_only=False)
    assert not (tmp_path / "executed").exists()
