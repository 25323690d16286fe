"""The commands, their options and what they print. The work itself is `aphq.api`; heavy imports wait until then."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from aphq.cli import hints
from aphq.cli.guard import guarded
from aphq.cli.options import model_arguments, parse_changes

app = typer.Typer(
    name="aphq",
    help="Quantize trained Vision Transformers to 2-8 bit integers with about 1024 unlabelled images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
recipe_app = typer.Typer(help="Show recipes and check your own.", no_args_is_help=True)
app.add_typer(recipe_app, name="recipe")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead of text.")]
Device = Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda, cuda:1; mps is untested.")]
Effort = Annotated[
    str | None,
    typer.Option(help="fast (search only), balanced (the default), paper (20 000 steps per unit), or best."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Change a recipe field, e.g. steps=500 or overrides.head=null."),
]
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="STAGE", help="Leave a stage out, e.g. mlp_reconstruction."),
]
CLASSIFIER = (
    "A timm or torchvision name, e.g. deit_small_patch16_224; a folder that transformers' save_pretrained wrote, or "
    "its name on the hub"
)
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Tracebacks and debug messages.")]


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        from aphq import __version__

        typer.echo(f"aphq {__version__}")
        raise typer.Exit()


@app.command()
@guarded(hints.QUANTIZE)
def quantize(
    model: Annotated[str, typer.Argument(help=f"{CLASSIFIER}; a detector, e.g. mask_rcnn_swin_t.")],
    data: Annotated[Path, typer.Option(help="Calibration images: a folder, a zip, or a text file with paths.")],
    out: Annotated[
        Path, typer.Option("--out", "-o", help="The run folder; start again with the same options to continue a run.")
    ],
    bits: Annotated[str, typer.Option(help="w8a8, w6a6, w4a8, w4a4, w3a3, any wXaY, or a recipe file.")] = "w4a4",
    effort: Effort = None,
    val: Annotated[Path | None, typer.Option(help="Labelled images (a folder per class) to measure on.")] = None,
    coco: Annotated[Path | None, typer.Option(help="For a detector: COCO annotations to measure on ...")] = None,
    coco_images: Annotated[Path | None, typer.Option(help="... and the folder of their images.")] = None,
    short_side: Annotated[
        int | None,
        typer.Option(min=1, help="For a detector: bring the short side of images to this many pixels (800)."),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A local .safetensors or .pth file.")] = None,
    num_classes: Annotated[int | None, typer.Option(min=0, help="If it differs from the model's default.")] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A further argument of timm.create_model, e.g. img_size=384, or field of a DetectorConfig.",
        ),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="How many calibration images (1024).")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of every random draw (3407).")] = None,
    set_: Set = None,
    without: Without = None,
    device: Device = "auto",
    gpu_memory: Annotated[float | None, typer.Option(help="GiB of cached activations on the GPU.")] = None,
    host_memory: Annotated[float | None, typer.Option(help="GiB of host memory for the run; the rest on disk.")] = None,
    val_limit: Annotated[
        int | None, typer.Option(min=1, help="Measure on this many images, spread over classes.")
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Quantize a model and write the run folder."""
    from aphq.cli.console import open_progress
    from aphq.cli.options import labels_from, recipe_from, scene_rules
    from aphq.cli.source import remember_source
    from aphq.engine.launch import is_first_process

    recipe = recipe_from(bits, effort, seed, images, parse_changes(set_), without)
    from aphq.api import quantize as run_quantize
    from aphq.models.loading import load_model

    arguments = model_arguments(model_arg)
    loaded = load_model(model, weights, num_classes, **arguments)
    with open_progress() as progress:
        run = run_quantize(
            loaded,
            recipe,
            data,
            out=out,
            val=labels_from(val, coco, coco_images),
            preprocessing=scene_rules(loaded, short_side),
            device=device,
            gpu_memory_gb=gpu_memory,
            host_memory_gb=host_memory,
            val_limit=val_limit,
            progress=progress,
        )
    if is_first_process():
        remember_source(out, model, loaded, weights, arguments)
        _say(run.to_dict() if as_json else run.summary())


@app.command(name="eval")
@guarded(hints.EVAL)
def evaluate(
    run: Annotated[Path, typer.Argument(help="A run folder, or an exported .onnx or .xml file.")],
    val: Annotated[Path | None, typer.Option(help="Labelled images, a folder per class.")] = None,
    coco: Annotated[Path | None, typer.Option(help="For a detector: a COCO instances file ...")] = None,
    images: Annotated[Path | None, typer.Option(help="... and the folder of its images.")] = None,
    detections: Annotated[
        Path | None, typer.Option(help="For a detector: also write what it finds here, as COCO results.")
    ] = None,
    runtime: Annotated[
        str | None,
        typer.Option(help="onnxruntime or openvino for an exported file; simulated or int8 for a run folder."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="This many images, spread over the classes.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images per forward pass; detectors take one at a time.")] = 50,
    device: Annotated[
        str, typer.Option(help="For a run folder: auto, cpu, cuda, cuda:1; exported files run on the CPU.")
    ] = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure the accuracy of a quantized model: top-1 of a classifier, box and mask AP of a detector."""
    from dataclasses import asdict

    from aphq.api import evaluate as run_evaluate
    from aphq.cli.console import open_progress
    from aphq.cli.detections import write_detections
    from aphq.cli.evaluation import check_options, check_source
    from aphq.cli.options import labels_from
    from aphq.errors import DataError
    from aphq.opening import open_model, task_for

    wanted = labels_from(val, coco, images)
    if wanted is None:
        raise DataError("nothing to measure on: give --val FOLDER, or --coco FILE and --images FOLDER for a detector")
    check_source(run)
    model = open_model(run, runtime)
    task = task_for(model)
    check_options(run, model, task, device=device, detections=detections)
    labelled = task.labelled(wanted, model)
    with open_progress() as progress, write_detections(detections) as options:
        progress.start("evaluation", min(len(labelled), limit or len(labelled)))
        options = {**options, "device": device, "batch": batch, "limit": limit}
        found = run_evaluate(model, labelled, progress=progress.advance, **options)
        progress.finish()
    skipped = [{"name": name, "reason": reason} for name, reason in getattr(labelled, "skipped", ())]
    _say({**asdict(found), "skipped": skipped} if as_json else str(found))


@app.command()
@guarded(hints.PREDICT)
def predict(
    run: Annotated[Path, typer.Argument(help="The run folder of a detector.")],
    image: Annotated[Path, typer.Argument(help="An image file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where to write the drawing (.png, .jpg, ...).")],
    weights: Annotated[
        Path | None, typer.Option(help="The float weights, to draw beside; found by themselves where they still are.")
    ] = None,
    score: Annotated[float, typer.Option(help="Draw what is at least this certain.")] = 0.5,
    coco: Annotated[Path | None, typer.Option(help="A COCO instances file, for the names of the classes.")] = None,
    device: Device = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Draw boxes, masks and labels that a quantized detector finds, beside those of the float one."""
    from aphq.cli.prediction import predict_and_draw

    found = predict_and_draw(run, image, out, weights=weights, threshold=score, coco=coco, device=device)
    counts = ", ".join(f"{len(objects)} by the {name} detector" for name, objects in found.items())
    _say({"out": str(out), "found": found} if as_json else f"{counts}; drawn in {out}")


@app.command()
@guarded(hints.EXPORT)
def export(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    to: Annotated[
        str, typer.Option(help="onnx, openvino (its own format) or torch (a torch.export program).")
    ] = "onnx",
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The file; model.onnx and so on in the run folder if left out.")
    ] = None,
    tuned_for: Annotated[
        str, typer.Option("--for", help="any, or onnxruntime or openvino: the runtime to shape an ONNX graph for.")
    ] = "any",
    batch: Annotated[str, typer.Option(help="Images per run of the file, or any.")] = "1",
    data: Annotated[Path | None, typer.Option(help="Images to compare on, instead of those the run kept.")] = None,
    images: Annotated[int, typer.Option(min=1, help="How many of them.")] = 32,
    force: Annotated[bool, typer.Option("--force", help="Write it even if it does not match.")] = False,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the model for another runtime, if it computes there what it does here."""
    from aphq.cli.options import batch_size
    from aphq.export import export as run_export

    size = batch_size(batch)
    found = run_export(run, to, out=out, data=data, images=images, batch=size, tuned_for=tuned_for, force=force)
    _say(found.to_dict() if as_json else found.summary())


@app.command()
@guarded(hints.BENCH)
def bench(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    runtime: Annotated[
        list[str] | None,
        typer.Option(help="onnxruntime, openvino, pytorch; repeat for more. All there are if left out."),
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="Threads of every runtime.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images per run.")] = 1,
    float_: Annotated[bool, typer.Option("--float", help="Measure the float model beside it, and the ratio.")] = False,
    seconds: Annotated[float, typer.Option(help="How long to measure, all together.")] = 20.0,
    memory: Annotated[bool, typer.Option(help="Measure memory too, each model in a process of its own.")] = True,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Measure latency, throughput, file size and memory, all models by turns in one process."""
    from aphq.bench import bench as run_bench
    from aphq.bench import bench_text

    found = run_bench(
        run, runtimes=runtime, threads=threads, batch=batch, with_float=float_, seconds=seconds, memory=memory
    )
    _say([row.to_dict() for row in found] if as_json else bench_text(found))


@app.command()
@guarded()
def inspect(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show what is quantized, how, in which ranges, and how large it is."""
    from aphq.cli.inspection import inspection, inspection_text

    found = inspection(run)
    _say(found if as_json else inspection_text(found))


@app.command()
@guarded(hints.ANALYZE)
def analyze(
    model: Annotated[str, typer.Argument(help=f"A classifier: {CLASSIFIER[0].lower()}{CLASSIFIER[1:]}.")],
    data: Annotated[Path, typer.Option(help="Images: a folder, a zip, or a text file with paths.")],
    bits: Annotated[
        str | None, typer.Option(help="Measure at wXaY; by default w4a4, or the nearest to --target-bits.")
    ] = None,
    target_bits: Annotated[
        float | None, typer.Option(help="Propose a recipe with so many bits on average, e.g. 4.5.")
    ] = None,
    effort: Effort = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write the proposed recipe (YAML, for quantize --bits).")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A local .safetensors or .pth file.")] = None,
    num_classes: Annotated[int | None, typer.Option(min=0, help="If it differs from the model's default.")] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A further argument of timm.create_model, e.g. img_size=384."),
    ] = None,
    images: Annotated[int | None, typer.Option(min=1, help="Held-out images to measure on (16).")] = None,
    seed: Annotated[int, typer.Option(help="The seed of every random draw.")] = 3407,
    device: Device = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Rank layers by how much quantizing them changes the prediction; with --target-bits, spend bits accordingly."""
    from aphq.analysis import analyze as run_analyze
    from aphq.analysis.findings import HELD_OUT
    from aphq.cli.analysis import analysis_text, write_proposal
    from aphq.cli.console import open_progress
    from aphq.models.loading import load_model

    loaded = load_model(model, weights, num_classes, **model_arguments(model_arg))
    with open_progress() as progress:
        found = run_analyze(
            loaded,
            data,
            bits,
            target_bits=target_bits,
            effort=effort or "balanced",
            images=images or HELD_OUT,
            device=device,
            seed=seed,
            progress=progress,
        )
    written = write_proposal(found, out, model)
    where = {} if written is None else {"recipe_file": str(written)}
    _say({**found.to_dict(), **where} if as_json else analysis_text(found, written))


@app.command()
@guarded()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="A run folder, or several to compare.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="The HTML file; by default report.html in the run, or beside the first run."),
    ] = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Write the report of a run, or of several side by side, as one HTML file."""
    from aphq.report import write_report

    written = write_report(runs, out)
    _say({"out": str(written), "runs": [str(run) for run in runs]} if as_json else f"written to {written}")


@app.command()
@guarded(hints.DEMO)
def demo(
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Keep the run folder here.")] = None,
    bits: Annotated[str, typer.Option(help="w3a3, w4a4, ...")] = "w3a3",
    device: Device = "auto",
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Quantize the embedded model on the embedded images: no data, no download, under three minutes on two cores."""
    from aphq.cli.console import open_progress
    from aphq.demo.run import demo_text, run_demo

    with open_progress() as progress:
        found = run_demo(bits, out=out, device=device, progress=progress)
    _say(found if as_json else demo_text(found))


@recipe_app.command("show")
@guarded()
def recipe_show(
    bits: Annotated[str, typer.Argument(help="w8a8, w6a6, w4a8, w4a4, w3a3, any wXaY, or a recipe file.")],
    effort: Effort = None,
    set_: Set = None,
    without: Without = None,
    as_json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Print a whole recipe as YAML, ready to edit and pass to --bits."""
    from aphq.cli.options import recipe_from

    recipe = recipe_from(bits, effort, None, None, parse_changes(set_), without)
    _say(recipe.to_dict() if as_json else recipe.to_yaml().rstrip())


@recipe_app.command("list")
@guarded()
def recipe_list(as_json: Json = False, verbose: Verbose = False) -> None:
    """Name the presets and efforts."""
    from typing import get_args

    from aphq.presets import PRESETS
    from aphq.presets import Effort as Efforts

    efforts = list(get_args(Efforts))
    text = f"presets: {', '.join(PRESETS)} (and any wXaY, X and Y from 2 to 8)\nefforts: {', '.join(efforts)}"
    _say({"presets": list(PRESETS), "efforts": efforts} if as_json else text)


def _say(result: Any) -> None:
    typer.echo(result if isinstance(result, str) else json.dumps(result, indent=2))


def main() -> None:
    app(prog_name="aphq", args=sys.argv[1:])
