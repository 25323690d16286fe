#!/usr/bin/env bash
# Effort `best` on everything that has a target, then at the other widths: benchmarks/best.sh DATA OUT [JOBS], with DATA
# holding weights/, imagenet/ and imagenette/. What matters most comes first, and runs that OUT holds already are left
# out, so that a script that was cut off goes on when it is started again. A run of DeiT-T holds 39 GB on the GPU.
set -euo pipefail
data=$1
out=$2
jobs=${3:-4}
export PYTHONPATH=src

measure() { # MODEL WEIGHTS IMAGES ARGUMENTS...
    local model=$1 weights=$2 images=$3
    shift 3
    python3 benchmarks/accuracy.py --model "$model" --weights "$data/weights/$weights.safetensors" \
        --calib "$data/$images/calib" --val "$data/$images/val" --out "$out" --skip-done "$@"
}
vits() { # ARGUMENTS...: both models, half of the runs each
    local model running=()
    for model in deit_tiny_patch16_224 vit_tiny_patch16_224; do
        measure "$model" "$model" imagenet --jobs "$(((jobs + 1) / 2))" "$@" &
        running+=($!)
    done
    for model in "${running[@]}"; do wait "$model"; done
}
swin() { # ARGUMENTS...: one run at a time, its first stage is wide
    measure swin_tiny_patch4_window7_224 swin_mini_imagenette imagenette \
        --model-args '{"embed_dim": 64, "num_heads": [2, 4, 8, 16]}' "$@"
}

targets=(--run=w3a3:best --run=w4a4:best)
others=(--run=w2a4:best --run=w3a8:best --run=w4a8:best)
vits "${targets[@]}" --seed 3407 --seed 1 --seed 2
swin "${targets[@]}"
vits "${others[@]}"
swin "${others[@]}"
swin "${targets[@]}" --seed 1 --seed 2
