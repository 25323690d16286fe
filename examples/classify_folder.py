"""Classify a folder of images with an exported file: python classify_folder.py model.onnx images/

Needs onnxruntime, numpy and pillow, nothing else: the file itself says how it wants its images.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image


def prepare(path, how):
    """Resize the short side, cut out the middle, normalise: float32 [1, channels, height, width]."""
    height, width = how["size"]
    image = Image.open(path).convert("RGB" if how["channels"] == 3 else "L")
    scale = max(height / image.height, width / image.width) / how["crop_pct"]
    size = (round(image.width * scale), round(image.height * scale))
    image = image.resize(size, Image.Resampling[how["interpolation"].upper()])
    left, top = (image.width - width) // 2, (image.height - height) // 2
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32) / 255
    pixels = (pixels.reshape(height, width, -1) - how["mean"]) / how["std"]
    return pixels.transpose(2, 0, 1)[None].astype(np.float32)


def main(model, folder):
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    how = json.loads(session.get_modelmeta().custom_metadata_map["aphq.preprocessing"])
    for path in sorted(p for p in Path(folder).rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp")):
        logits = session.run(None, {session.get_inputs()[0].name: prepare(path, how)})[0][0]
        best = logits.argsort()[::-1][:3]
        print(path, *(f"class {i} ({logits[i]:.2f})" for i in best))


if __name__ == "__main__":
    main(*sys.argv[1:])
