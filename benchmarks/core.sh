#!/usr/bin/env bash
# Every row of results/core.jsonl: benchmarks/core.sh DATA OUT, with DATA holding weights/, imagenet/ and imagenette/.
# Runs of one model share a GPU; the seconds in the table are those of runs side by side, not of one run alone.
set -euo pipefail
data=$1
out=$2
paper=paper:steps=2000
qdrop=importance.kind=mse:-mlp_reconstruction
export PYTHONPATH=src

classifier() { # NAME JOBS RUNS...
    local name=$1 jobs=$2
    shift 2
    python3 benchmarks/accuracy.py --model "$name" --weights "$data/weights/$name.safetensors" --out "$out" \
        --calib "$data/imagenet/calib" --val "$data/imagenet/val" --jobs "$jobs" "${@/#/--run=}"
}
swin() { # JOBS RUNS...
    local jobs=$1
    shift
    python3 benchmarks/accuracy.py --model swin_tiny_patch4_window7_224 --out "$out" --jobs "$jobs" \
        --model-args '{"embed_dim": 64, "num_heads": [2, 4, 8, 16]}' \
        --weights "$data/weights/swin_mini_imagenette.safetensors" \
        --calib "$data/imagenette/calib" --val "$data/imagenette/val" "${@/#/--run=}"
}

runs=(w8a8:fast w6a6:fast "float:$paper" "w3a3:$paper" "w3a3:$paper:$qdrop" "w4a4:$paper")
importances=()
for kind in mse brecq ph fisher fisher:importance.power=1.0; do
    importances+=("w3a3:$paper:importance.kind=$kind")
done
classifier deit_tiny_patch16_224 2 "${runs[@]}" "${importances[@]}" w3a3:paper &
classifier vit_tiny_patch16_224 1 "${runs[@]}" &
swin 1 "${runs[@]}" &
wait
