"""Random recipes on the embedded model for as long as one likes: each run finishes, or says why not.

Of every run that finishes, the artifact is loaded and held against the model bit by bit. Some runs are killed at a
random moment and go on, some cache on disk, some meet a full disk, some are exported, some have their files damaged
afterwards. A run that does anything else than finish or raise an AphqError ends the soak with its seed.

    python scripts/soak.py --minutes 60 [--seed 1] [--out soak.jsonl]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tests.disks import SmallDisk

import aphq
from aphq.artifact.saving import file_sha256
from aphq.demo.assets import Assets, load_assets
from aphq.errors import AphqError
from aphq.recipe import Recipe

LIMIT = 600.0  # seconds of one life of a run
STEPS = (0, 1, 3)


def random_recipe(rng: random.Random) -> dict[str, Any]:
    """Plain values, most of them sensible; what makes no sense must be refused by name."""
    pick, flag = rng.choice, lambda: rng.random() < 0.5
    views = {"every": pick([0, 0, 2]), "copies": 0, "mixup": pick([0.0, 0.5]), "cutmix": pick([0.0, 0.5])}
    if not views["every"]:
        views["copies"] = pick([0, 1, 2])
    kind = pick(
        ["mse", "fisher", "aph"] if views["every"] or views["copies"] else ["mse", "brecq", "ph", "aph", "fisher"]
    )
    learned = {
        "steps": pick(STEPS),
        "batch": pick([1, 4, 16]),
        "importance": {"kind": kind, "probes": pick([1, 2]), "power": pick([0.0, 0.5, 1.0])},
        "views": views,
    }
    search = {
        "method": pick(["minmax", "percentile", "self_mse", "output_mse"]),
        "images": pick([1, 8]),
        "candidates": pick([1, 2, 9]),
        "rounds": pick([0, 1, 2]),
        "tokens": pick([1, 17, 256]),
        "outlier_candidates": pick([0, 0, 3]),
        "outlier_ratio": pick([4.0, 20.0]),
        "outlier_images": pick([1, 8]),
    }
    optional: dict[str, dict[str, Any]] = {
        "rotation": {"stream": flag(), "heads": flag()},
        "mlp_reconstruction": learned,
        "layernorm_reparameterisation": {"images": pick([1, 8]), "candidates": pick([1, 4]), "values": flag()},
        "scale_search": search,
        "error_compensation": {"images": pick([1, 8]), "tokens": pick([16, 256])},
        "block_reconstruction": {
            **learned,
            "quantized_share": pick([0.01, 0.5, 1.0]),
            "input_quantized_share": pick([0.0, 0.5, 1.0]),
            "float_lr": pick([0.0, 1e-3]),
            "rounding_lr": pick([1e-3, 0.1, 10.0]),
        },
        "joint_tuning": {
            "steps": pick(STEPS),
            "batch": pick([1, 16]),
            "weight_lr": pick([0.0, 1e-2]),
            "views": {"every": pick([1, 3])},
        },
    }
    left_out = {pick(["error_compensation", "block_reconstruction"])} | {n for n in optional if rng.random() < 0.4}
    if rng.random() < 0.95:
        left_out -= {"scale_search"}
    bits = [2, 3, 4, 4, 5, 6, 7, 8, 8]
    patterns = ["head", "blocks.0.*", "*.fc1", "*attn*", "patch_embed.proj", "nothing", "*"]
    return {
        "name": "soak",
        "seed": rng.randrange(2**31),
        "weights": {
            "bits": pick([*bits, None]) if flag() else pick(bits),
            "symmetric": flag(),
            "granularity": pick(["channel", "channel", "tensor"]),
        },
        "activations": {
            "bits": pick([*bits, None]) if flag() else pick(bits),
            "symmetric": flag(),
            "attention": pick(["head", "tensor"]),
            "image_bits": pick([8, 4, None]),
            "attention_symmetric": flag(),
        },
        "overrides": {
            pattern: pick([None, {"weights": 8}, {"activations": 8}, {"weights": 2, "activations": 3}])
            for pattern in rng.sample(patterns, pick([0, 0, 1, 3]))
        },
        "calibration": {"images": pick([1, 5, 16]), "batch": pick([1, 8, 32])},
        "stages": [{"kind": name, **value} for name, value in optional.items() if name not in left_out],
    }


def in_a_child(work: Callable[[], Any], kill_after: float | None = None) -> dict[str, Any]:
    """How `work` ended in a process of its own: finished, refused, killed by us, or broken."""
    sys.stdout.flush()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(work, writer)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], LIMIT if kill_after is None else kill_after)
    if not ready:
        os.kill(child, signal.SIGKILL)
    content = b"".join(iter(lambda: os.read(reader, 65536), b"")) if ready else b""
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if not ready:
        kind = "broken" if kill_after is None else "killed"
        return {"kind": kind, "message": f"no end after {LIMIT:.0f} s" if kill_after is None else ""}
    return json.loads(content) if content else {"kind": "broken", "message": f"died with status {status}"}


def _report(work: Callable[[], Any], writer: int) -> None:
    found: dict[str, Any]
    try:
        torch.set_num_threads(1)
        try:
            found = {"kind": "finished", "value": work()}
        except AphqError as problem:
            found = {"kind": "refused", "message": f"{type(problem).__name__}: {problem}"}
        except BaseException:
            found = {"kind": "broken", "message": traceback.format_exc()[-3000:]}
        os.write(writer, json.dumps(found).encode())
    finally:
        os._exit(0)


class Soak:
    """One random case after another."""

    def __init__(self, assets: Assets, folder: Path) -> None:
        self.assets, self.folder = assets, folder

    def quantize(self, recipe: Recipe, out: Path, disk_only: bool) -> aphq.Run:
        options: dict[str, Any] = {"host_memory_gb": 0.0} if disk_only else {}
        options["preprocessing"] = self.assets.preprocessing
        return aphq.quantize(self.assets.model, recipe, self.assets.calibration, out=out, device="cpu", **options)

    def whole(self, recipe: Recipe, out: Path, disk_only: bool) -> str:
        """Quantize, load what was saved and compare bit by bit; the hash of the artifact."""
        run = self.quantize(recipe, out, disk_only)
        again = aphq.load(out)
        kept, loaded = run.model.state_dict(), again.state_dict()
        assert kept.keys() == loaded.keys(), "other tensors"
        different = [name for name in kept if not torch.equal(kept[name], loaded[name])]
        assert not different, f"other values in {different[:3]}"
        images = self.assets.preprocessing.normalise(self.assets.test.images[:8])
        with torch.no_grad():
            assert torch.equal(run.model(images), again(images)), "other outputs"
            assert torch.isfinite(again(images)).all(), "outputs that are not finite"
        return file_sha256(out / "model.safetensors")

    def case(self, rng: random.Random) -> dict[str, Any]:
        """What happened, and "broken" if that must not happen."""
        for old in self.folder.iterdir():
            if not old.is_mount():
                shutil.rmtree(old)
        plain = random_recipe(rng)
        disk_only = rng.random() < 0.2
        try:
            recipe = Recipe.from_dict(plain)
        except AphqError as problem:
            return {"kind": "refused", "message": str(problem), "then": []}
        started = time.monotonic()
        first = in_a_child(lambda: self.whole(recipe, self.folder / "run", disk_only))
        seconds = time.monotonic() - started
        found = {**first, "then": [], "seconds": round(seconds, 1), "recipe": plain}
        if first["kind"] != "finished":
            return found
        then = [name for name, chance in CHANCES.items() if rng.random() < chance]
        for name in then:
            problem = getattr(self, name)(rng, recipe, disk_only, first["value"], seconds)
            if problem is not None:
                return {**found, "then": then, "kind": "broken", "message": f"{name}: {problem}"}
        return {**found, "then": then}

    # -- what may happen to a run; each gives a problem, or None ------------------------------------------------------

    def killed(self, rng: random.Random, recipe: Recipe, disk_only: bool, sha: str, seconds: float) -> str | None:
        out, kills = self.folder / "killed", 0
        while in_a_child(lambda: self.whole(recipe, out, disk_only), rng.uniform(0, seconds))["kind"] == "killed":
            kills += 1
            if kills == 3:
                break
        end = in_a_child(lambda: self.whole(recipe, out, disk_only))
        return None if end.get("value") == sha else f"{kills} kills, then {end} instead of {sha}"

    def full_disk(self, rng: random.Random, recipe: Recipe, disk_only: bool, sha: str, seconds: float) -> str | None:
        (self.folder / "mounts").mkdir()
        disk = SmallDisk(self.folder / "mounts" / "disk")
        if not disk.mount(rng.choice([8, 64, 300, 800])):
            return None
        try:
            first = in_a_child(lambda: self.whole(recipe, disk.path / "run", disk_only))
            if first["kind"] == "broken":
                return str(first["message"])
            disk.remount("size=1g")
            end = in_a_child(lambda: self.whole(recipe, disk.path / "run", disk_only))
            return None if end.get("value") == sha else f"{first['kind']}, then {end} instead of {sha}"
        finally:
            disk.unmount()

    def exported(self, rng: random.Random, recipe: Recipe, disk_only: bool, sha: str, seconds: float) -> str | None:
        from aphq.export import export

        to = rng.choice(["onnx", "torch"])
        end = in_a_child(lambda: str(export(self.folder / "run", to).path))
        return None if end["kind"] in ("finished", "refused") else f"{to}: {end['message']}"

    def damaged(self, rng: random.Random, recipe: Recipe, disk_only: bool, sha: str, seconds: float) -> str | None:
        """A file cut, or a byte of it changed: refused, or harmless."""
        name = rng.choice(["config.json", "model.safetensors", "run.json", "events.jsonl", "result.json"])
        file = self.folder / "run" / name
        content = bytearray(file.read_bytes())
        at = rng.randrange(len(content))
        if rng.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= 1 << rng.randrange(8)
        file.write_bytes(bytes(content))
        end = in_a_child(lambda: self.quantize(recipe, self.folder / "run", disk_only).to_dict())
        return end["message"] if end["kind"] == "broken" else None


CHANCES = {"killed": 0.4, "full_disk": 0.15, "exported": 0.15, "damaged": 0.4}  # in this order: the last one spoils


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="of the first case; the next has the next")
    parser.add_argument("--out", type=Path, default=None, help="a line of JSON for each case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(10**6) * 1000 if options.seed is None else options.seed
    until = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()
    assets = load_assets()
    with tempfile.TemporaryDirectory(prefix="aphq-soak-") as folder:
        soak = Soak(assets, Path(folder))
        while time.monotonic() < until:
            found = {"seed": seed, **soak.case(random.Random(seed))}
            counts.update([found["kind"], *found["then"]])
            if options.out is not None:
                with open(options.out, "a", encoding="utf-8") as handle:
                    handle.write(json.dumps(found) + "\n")
            note = found.get("message", "") or ", ".join(found["then"])
            print(f"{seed} {found['kind']} {found.get('seconds', 0):.0f} s {note[:160]}", flush=True)
            if found["kind"] == "broken":
                print(json.dumps(found.get("recipe")), found["message"], f"repeat it with --seed {seed}", sep="\n")
                sys.exit(1)
            seed += 1
    print(f"{sum(counts[k] for k in ('finished', 'refused'))} cases: {dict(counts)}")


if __name__ == "__main__":
    main()
