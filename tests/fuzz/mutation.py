"""Spoiling valid files: values, keys and types of JSON, bytes, headers and tensors of safetensors."""

import copy
import json
import struct
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

ODD: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 255, 65536, 10**6, 2**31, 2**40, 2**63, 10**30, 10**400, -(2**63),
    0.5, -0.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf"),
    "", "x", "a" * 2000, "../../etc/passwd", "\x00", "\ud800", "ünï", "os.system", "1e5", "null", "__class__",
    [], {}, [[]], [0, 0], [1] * 3000, {"a": {"b": []}}, [[[[[[[[]]]]]]]], ["x", 1, None],
]  # fmt: skip
DTYPES = [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool]


class Spoiler:
    """Draws from hypothesis, so that a failing case can be shrunk and repeated."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data

    def below(self, count: int) -> int:
        return self.data.draw(st.integers(0, max(0, count - 1)))

    def one_of(self, items: Any) -> Any:
        return items[self.below(len(items))]

    def odd(self) -> Any:
        """A value of its own: the next change may be to its inside."""
        return copy.deepcopy(self.one_of(ODD))

    # -- JSON --------------------------------------------------------------------------------------------------------

    def json_text(self, text: str) -> str:
        """A JSON document with one to three things wrong."""
        value = json.loads(text)
        for _ in range(1 + self.below(3)):
            value = self.value(value)
        spoilt = json.dumps(value)
        way = self.below(24)
        if way == 0:  # a key twice
            spoilt = spoilt.replace("{", '{"version": 1, "version": 2, ', 1)
        elif way == 1:  # depth
            spoilt = spoilt.replace("[", "[" * self.one_of([50, 5000, 200_000]), 1)
        return spoilt

    def value(self, value: Any) -> Any:
        """A plain structure with one place changed."""
        places = list(_places(value))
        if not places:
            return self.odd()
        owner, key = places[self.below(len(places))]
        way = self.below(8)
        if way == 0:
            del owner[key]
        elif way == 1 and isinstance(owner, dict):
            owner[self.one_of(["", "x", f"{key}s", str(key).upper(), "\ud800"])] = owner.pop(key)
        elif way == 2:
            other, place = places[self.below(len(places))]
            owner[key] = json.loads(json.dumps(other.get(place) if isinstance(other, dict) else _at(other, place)))
        elif way == 3 and isinstance(owner[key], (int, float)) and not isinstance(owner[key], bool):
            owner[key] = owner[key] * self.one_of([-1, 2, 10, 1000, 10**6, 10**9]) + self.one_of([0, 1, -1])
        elif way == 4:
            owner[key] = [owner[key]] * self.one_of([1, 2, 2000])
        elif way == 5:
            owner[key] = str(owner[key])
        else:
            owner[key] = self.odd()
        return value

    # -- bytes -------------------------------------------------------------------------------------------------------

    def bytes(self, content: bytes) -> bytes:
        spoilt = bytearray(content)
        for _ in range(1 + self.below(4)):
            at = self.below(len(spoilt))
            if self.below(3) == 0:
                at = min(at, self.below(64))  # headers are at the front
            way = self.below(7)
            if way == 0:
                del spoilt[at:]
            elif way == 1 and spoilt:
                spoilt[at] ^= 1 << self.below(8)
            elif way == 2:
                spoilt[at : at + 4] = b"\xff" * 4
            elif way == 3:
                del spoilt[at : at + 1 + self.below(16)]
            elif way == 4:
                spoilt[at:at] = spoilt[at : at + 1 + self.below(64)]
            elif way == 5:
                spoilt[at : at + 8] = struct.pack("<Q", self.one_of([0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1]))
            elif spoilt:
                spoilt[at] = self.below(256)
        return bytes(spoilt)

    # -- safetensors -------------------------------------------------------------------------------------------------

    def header(self, content: bytes) -> bytes:
        """The JSON in front spoilt, its length right or wrong."""
        (size,) = struct.unpack("<Q", content[:8])
        header = self.json_text(content[8 : 8 + size].decode()).encode("utf-8", "surrogatepass")
        length = len(header) if self.below(4) else self.one_of([0, 1, len(header) - 1, len(header) + 1, 2**40, 2**63])
        return struct.pack("<Q", length) + header + content[8 + size :]

    def tensors(self, content: bytes) -> dict[str, Tensor]:
        """The tensors with some gone, of another type or shape, or with other values."""
        tensors = load(content)
        for _ in range(1 + self.below(2)):
            name = self.one_of(sorted(tensors))
            tensor = tensors[name]
            way = self.below(7)
            if way == 0:
                del tensors[name]
            elif way == 1:
                tensors[name] = tensor.to(self.one_of(DTYPES))
            elif way == 2:
                tensors[name] = tensor.reshape(-1)[: self.below(tensor.numel() + 1)].clone()
            elif way == 3:
                tensors[name] = tensor[None].clone()
            elif way == 4 and tensor.is_floating_point():
                value = self.one_of([0.0, -1.0, torch.finfo(tensor.dtype).max, float("nan"), float("inf")])
                flat = tensor.clone().reshape(-1)
                flat[:1] = value
                tensors[name] = flat.reshape(tensor.shape)
            elif way == 5:
                tensors[self.one_of(["", "x", f"{name}.x", "ü"])] = tensor.clone()
            else:
                tensors[name] = torch.zeros_like(tensor) + self.one_of([0, 1, 255])
        return tensors

    def safetensors(self, content: bytes) -> bytes:
        way = self.below(3)
        if way == 0:
            return self.bytes(content)
        return self.header(content) if way == 1 else save(self.tensors(content))


def _at(owner: list[Any], place: int) -> Any:
    return owner[place] if place < len(owner) else None


def _places(value: Any) -> Any:
    """(container, key) of everything inside."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        items = here.items() if isinstance(here, dict) else enumerate(here) if isinstance(here, list) else ()
        for key, inner in list(items)[:200]:
            yield here, key
            waiting.append(inner)
