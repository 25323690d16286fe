"""The public verbs: quantize a model, evaluate one; see `aphq.artifact` for save and load."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from aphq import __version__
from aphq.artifact.info import QuantizationInfo, attach, info_of
from aphq.artifact.loading import load
from aphq.artifact.saving import CONFIG, save
from aphq.data import CalibrationSet, Preprocessing
from aphq.data.scenes import ScenePreprocessing
from aphq.engine.folder import RunFolder
from aphq.engine.loop import matmul_precision
from aphq.engine.memory import PeakMemory, cache_bytes
from aphq.engine.progress import Progress
from aphq.engine.ranks import Ranks
from aphq.engine.store import Store
from aphq.engine.workspace import Images, Workspace
from aphq.errors import AphqError, ModelError, RecipeError
from aphq.models.architecture import Architecture, Unit, architecture_of, mlps_of
from aphq.models.loading import load_model, misfit_of, model_fingerprint
from aphq.models.student import built_again, finalise, make_student, opened_copy
from aphq.opening import open_model, preprocessing_of, resolve_device, task_for
from aphq.presets import resolve_recipe
from aphq.recipe import BlockReconstruction, JointTuning, MlpReconstruction, Recipe
from aphq.recipe_checks import check_runnable
from aphq.report import write_report
from aphq.report.observe import write_measurements
from aphq.run import Run
from aphq.runtimes.session import ExportedModel
from aphq.stages import RUN_STAGE
from aphq.tasks import Task, task_of

log = logging.getLogger(__name__)
GIB = 2**30


def quantize(
    model: nn.Module | str,
    recipe: Recipe | str | Path = "w4a4",
    data: Any = None,
    *,
    effort: str | None = None,
    out: str | Path | None = None,
    val: Any = None,
    weights: str | Path | None = None,
    preprocessing: Preprocessing | ScenePreprocessing | None = None,
    device: str | torch.device = "auto",
    gpu_memory_gb: float | None = None,
    host_memory_gb: float | None = None,
    val_limit: int | None = None,
    progress: Progress | None = None,
) -> Run:
    """Quantize `model` with unlabelled images.

    Started by `torchrun`, the processes share the work; the first saves and measures, the others get the model alone.

    Args:
        model: a Vision Transformer of timm, torchvision or transformers (docs/models.md); a name in timm or torchvision
            (weights from the hub or the file `weights`); a folder that transformers' save_pretrained wrote, or its name
            on the hub; a detector of `aphq.detection`, or its name with the file `weights`; torchvision's MaskRCNN or
            FasterRCNN with a ResNet or timm's Swin or ViT (docs/detect.md).
        recipe: a preset name such as "w4a4" at an `effort`, a YAML or JSON file, or a Recipe.
        data: a folder, list or zip of images, a tensor, a DataLoader or any iterable of images; see `load_calibration`.
        effort: "fast", "balanced" (the default), "paper" or "best", for a preset.
        out: the run folder; a run that was stopped goes on when called again. None keeps everything in memory.
        val: labelled images to measure float and quantized accuracy on; for a detector (instances.json, folder of
            images).
        weights: a local weights file, for a model given by name.
        preprocessing: what the model expects of its images, where it does not say so itself.
        device: "auto" is the first GPU, or the CPU.
        gpu_memory_gb: GiB of cached activations on the GPU; what is more goes to host memory.
        host_memory_gb: GiB of host memory for the whole process; what does not fit goes to disk, in the run folder.
        val_limit: measure on this many images, spread over the classes.
        progress: what is told how far the run is.
    """
    chosen = resolve_recipe(recipe, effort)
    check_runnable(chosen)
    target = resolve_device(device)
    ranks = Ranks.join(target)
    progress = progress if progress is not None and ranks.first else Progress()
    teacher, architecture, units = _prepare_model(model, weights, target)
    task = task_of(architecture, teacher)
    chosen = task.adapt(chosen)
    preprocessing = preprocessing or task.preprocessing_of(teacher)
    task.check(teacher, units, preprocessing, target)
    _check_description(teacher, architecture, task, units, preprocessing, target)
    labelled = None if val is None else task.labelled(val, teacher)
    images = _load_images(task, data, preprocessing, chosen, progress)
    if labelled is not None:
        task.keep_apart(images, labelled)
    for stage in chosen.stages:
        if isinstance(stage, (MlpReconstruction, BlockReconstruction, JointTuning)):
            ranks.share_of(min(stage.batch, len(images)))  # refused before anything is written

    before = torch.cuda.current_device() if target.type == "cuda" else None
    folder = RunFolder(None if out is None else Path(out), writes=ranks.first)
    try:
        if before is not None:
            torch.cuda.set_device(target)  # where kernels are launched and steps are recorded
        sha = model_fingerprint(teacher, architecture)
        identity = {"recipe": chosen.to_dict(), "model": sha, "images": images.fingerprint, "aphq": __version__}
        ranks.require_same("a recipe, a model or images", json.dumps(identity, sort_keys=True))
        resumed = ranks.decide(folder.claim(identity))
        folder.event("resumed" if resumed else "started", device=str(target), images=len(images))
        run = Run(teacher, chosen, folder.path, resumed=resumed, images=images)
        if ranks.decide(resumed and folder.path is not None and (folder.path / CONFIG).exists()):
            assert folder.path is not None
            run.model = load(folder.path, target)
            run.recall(folder.earlier_result(), task)
            log.info("%s is finished already; nothing to redo", folder.path)
        else:
            student = make_student(teacher, architecture, units, chosen).to(target)
            store = _store(target, folder, gpu_memory_gb, host_memory_gb)  # what the models left
            known = task.prepare(images, teacher, target, progress)
            places = (target, store, folder, progress, ranks)
            extras = (architecture.streams(teacher), task.distillation)
            work = Workspace(teacher, student, units, known, chosen, *places, *extras)
            run.seconds = _run_stages(work)
            finalise(student)
            attach(student, _info(teacher, student, architecture, units, chosen, preprocessing, sha))
            run.model = student
            if ranks.first:
                _observe(work)
        ranks.leave()
        if not ranks.first:
            return run
        if folder.path is not None:
            _save(run, task, units, preprocessing, target)
            if isinstance(images, CalibrationSet):
                folder.keep_sample(images.images)
        if labelled is not None:
            _measure(run, task, teacher, labelled, preprocessing, target, progress, val_limit)
        folder.write_result(run.to_dict())
        folder.event("finished", **run.to_dict())
        folder.drop_checkpoints()
        _report(folder)
        return run
    finally:
        folder.close()
        if before is not None:
            torch.cuda.set_device(before)


def evaluate(
    model: nn.Module | str | Path,
    val: Any,
    *,
    runtime: str | None = None,
    preprocessing: Preprocessing | ScenePreprocessing | None = None,
    device: str | torch.device = "auto",
    batch: int = 50,
    limit: int | None = None,
    progress: Callable[[int], None] | None = None,
    keep: Callable[[Any], None] | None = None,
) -> Any:
    """Top-1 and top-5 (`Accuracy`) of a model, a saved run or an exported file on labelled images, or the box and mask
    AP of a detector (`DetectionAccuracy`).

    Args:
        model: a module, a run folder or an exported file.
        val: labelled images: a folder per class; for a detector (instances.json, folder of images).
        runtime: what runs a .onnx or .xml file, "onnxruntime" or "openvino"; for a run folder "simulated" or "int8".
        preprocessing: what the model expects of its images, where it does not say so itself.
        device: "auto" is the first GPU, or the CPU.
        batch: images per forward pass.
        limit: measure on this many images, spread over the classes.
        progress: called with the number of images done since the last call.
        keep: gets every detection of a detector.
    """
    if isinstance(model, (str, Path)):
        model = open_model(model, runtime)
    target = resolve_device("cpu" if isinstance(model, ExportedModel) else device)
    info = info_of(model)
    task = task_for(model)
    chosen = preprocessing or (info.preprocessing if info else preprocessing_of(model))
    options: dict[str, Any] = {"batch": batch, "limit": limit, "progress": progress, "keep": keep}
    data = task.labelled(val, model)
    with _borrowed(model, target):
        return task.measure({"model": model}, data, chosen, device=target, **options).accuracy["model"]


@contextlib.contextmanager
def _borrowed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """On the device and in eval mode meanwhile, then as it was."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    home, training = next((tensor.device for tensor in tensors), device), model.training
    try:
        model.to(device).eval()
        yield
    finally:
        model.to(home).train(training)


def _prepare_model(
    model: nn.Module | str, weights: str | Path | None, device: torch.device
) -> tuple[nn.Module, Architecture, tuple[Unit, ...]]:
    """The teacher: a float32 copy in eval mode."""
    if isinstance(model, str):
        model = load_model(model, weights)
    elif weights is not None:
        raise ModelError("`weights` goes with a model's name; load them into the module yourself")
    if info_of(model) is not None:
        raise ModelError("this model is quantized already; start from the float model")
    architecture = architecture_of(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_meta:
            raise ModelError(f"{name} is on the meta device, which holds no values: load the weights first")
    teacher = opened_copy(model, architecture).to(device)
    return teacher, architecture, architecture.units(teacher)


def _check_description(
    teacher: nn.Module,
    architecture: Architecture,
    task: Task,
    units: Sequence[Unit],
    preprocessing: Any,
    device: torch.device,
) -> None:
    """What an artifact says of a model must be enough to build it again: better known now than after the run."""
    twin = built_again(architecture, json.loads(json.dumps(architecture.describe(teacher))))
    kind, state = type(teacher).__name__, teacher.state_dict()
    if misfit := misfit_of(twin, state):
        raise ModelError(f"a part of this {kind} is not as the library builds it, and cannot be saved ({misfit})")
    twin.load_state_dict(state)
    twin.to(device).eval().requires_grad_(False)
    expected, got = (task.outputs(model, units, preprocessing, device) for model in (teacher, twin))
    if different := _different(expected, got):
        raise ModelError(
            f"this {kind} was changed after it was built, in a way that cannot be saved: built again from its "
            f"description, it computes something else ({different})"
        )


def _save(run: Run, task: Task, units: Sequence[Unit], preprocessing: Any, device: torch.device) -> None:
    """What was saved must load and compute what the model in memory does; otherwise it is no artifact."""
    assert run.path is not None
    run.sizes = save(run.model, run.path)
    try:
        expected = task.outputs(run.model, units, preprocessing, device)
        if different := _different(expected, task.outputs(load(run.path, device), units, preprocessing, device)):
            raise ModelError(
                f"the model saved in {run.path} does not compute what the one in memory does ({different}): a part of "
                f"this {type(run.model).__name__} is not in its description; please report it with its definition"
            )
    except AphqError:
        (run.path / CONFIG).unlink(missing_ok=True)  # by which a folder counts as finished
        raise


def _different(expected: dict[str, Tensor], got: dict[str, Tensor]) -> str | None:
    """The name of an output that is not the same."""
    close = {k: torch.allclose(x, got[k], rtol=1e-4, atol=1e-4 * float(x.abs().max())) for k, x in expected.items()}
    return next((name for name, same in close.items() if not same), None)


def _load_images(task: Task, data: Any, preprocessing: Any, recipe: Recipe, progress: Progress) -> Images:
    if data is None:
        raise RecipeError("quantization needs calibration images: pass `data` (a folder of about 1024 images will do)")
    progress.start("images", recipe.calibration.images)
    seen = 0

    def report(done: int, _: int) -> None:
        nonlocal seen
        progress.advance(done - seen)
        seen = done

    images = task.images(data, preprocessing, recipe, report)
    progress.finish()
    return images


def _store(device: torch.device, folder: RunFolder, gpu_gb: float | None, host_gb: float | None) -> Store:
    for name, value in (("GPU", gpu_gb), ("host", host_gb)):
        if value is not None and not 0 <= value < 1e9:
            raise RecipeError(f"the budget of {name} memory is a number of GiB, 0 or more; got {value}")
    budgets = {
        "gpu_bytes": None if gpu_gb is None else int(gpu_gb * GIB),
        "host_bytes": None if host_gb is None else cache_bytes(int(host_gb * GIB), device),
    }
    return Store(device, **budgets, folder=folder.path)


def _run_stages(work: Workspace) -> dict[str, float]:
    seconds = {}
    for stage in work.recipe.stages:
        work.folder.event("stage_started", stage=stage.NAME)
        started, memory = time.monotonic(), PeakMemory(work.device)
        with matmul_precision("highest"):  # importance by perturbation lives in the last bits
            RUN_STAGE[type(stage)](work, stage)
        seconds[stage.NAME] = time.monotonic() - started
        work.folder.event(
            "stage_finished",
            stage=stage.NAME,
            seconds=round(seconds[stage.NAME], 3),
            memory=memory.read(),
            cached={tier: size for tier, size in work.store.peak.items() if size},
        )
    return seconds


def _observe(work: Workspace) -> None:
    """Measurements for the report; hours of work must not be lost to a picture that cannot be drawn."""
    if work.folder.path is not None:
        try:
            write_measurements(work, work.folder.path)
        except Exception as problem:
            log.warning("the report will lack its measurements: %s: %s", type(problem).__name__, problem)


def _report(folder: RunFolder) -> None:
    if folder.path is not None:
        try:
            write_report([folder.path])
        except Exception as problem:
            log.warning("no report was written: %s; `aphq report %s` tries again", problem, folder.path)


def _info(
    teacher: nn.Module,
    student: nn.Module,
    architecture: Architecture,
    units: Sequence[Unit],
    recipe: Recipe,
    preprocessing: Any,
    sha: str,
) -> QuantizationInfo:
    swapped = [
        name
        for name, mlp in mlps_of(units).items()
        if type(student.get_submodule(mlp.act)) is not type(teacher.get_submodule(mlp.act))
    ]
    return QuantizationInfo(
        family=architecture.family,
        arguments=architecture.describe(teacher),
        relu=tuple(swapped),
        recipe=recipe,
        preprocessing=preprocessing,
        float_sha256=sha,
        float_parameters=sum(p.numel() for p in teacher.parameters()),
    )


def _measure(
    run: Run,
    task: Task,
    teacher: nn.Module,
    data: Any,
    preprocessing: Any,
    device: torch.device,
    progress: Progress,
    limit: int | None,
) -> None:
    progress.start("evaluation", min(len(data), limit or len(data)))
    models = {"float": teacher, "quantized": run.model}
    found = task.measure(models, data, preprocessing, device=device, limit=limit, progress=progress.advance)
    progress.finish()
    run.accuracy, run.agreement = found.accuracy, found.agreement
