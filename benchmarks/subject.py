"""Which model a benchmark is about, and the images that calibrate it: the arguments, and the model that they name."""

from __future__ import annotations

import argparse
import json


def parser_for(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--model-args", default="{}", help="JSON of further arguments of timm.create_model")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--calib", required=True)
    return parser


def model_of(args: argparse.Namespace):
    from aphq.models.loading import load_model

    extra = {k: tuple(v) if isinstance(v, list) else v for k, v in json.loads(args.model_args).items()}
    return load_model(args.model, args.weights, **extra)
