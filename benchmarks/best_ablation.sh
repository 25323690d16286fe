#!/usr/bin/env bash
# What each ingredient of effort `best` is worth, on held-out calibration images:
#     benchmarks/best_ablation.sh MODEL DATA OUT, with DATA holding weights/ and imagenet/.
# `best` with 1 000 steps per unit, then joint tuning of 800 steps: whole, with one ingredient left out, and from block
# reconstruction alone with one added after the other. OUT gets explore.py's lines.
set -euo pipefail
model=$1
data=$2
out=$3
export PYTHONPATH=src

whole=w3a3:best:-joint_tuning:block_reconstruction.steps=1000:mlp_reconstruction.steps=1000
joint=joint_tuning:steps=800

explore() {
    python3 benchmarks/explore.py --model "$model" --weights "$data/weights/$model.safetensors" \
        --calib "$data/imagenet/calib" --used 448 --out "$out" "$@"
}

explore --base "$whole" --then "$joint" --then "$joint:views.every=0" --then "$joint:views.mixup=0.0:views.cutmix=0.0" \
    --then "$joint:feature_weight=0.0" --then "$joint:float_lr=0.0" # and without joint tuning: the base itself

ingredients=( # as they are left out, in the order in which they are added
    importance.kind=mse
    -mlp_reconstruction
    -rotation
    block_reconstruction.views.copies=0
    block_reconstruction.float_lr=0.0
    block_reconstruction.quantized_share=0.5
    block_reconstruction.weight_lr=0.0:block_reconstruction.rounding_lr=0.01:block_reconstruction.input_quantized_share=0.5
)
for without in "${ingredients[@]}"; do
    explore --base "$whole:$without" --then "$joint"
done
for added in "${!ingredients[@]}"; do # the first so many
    rest=("${ingredients[@]:$added}")
    explore --base "$whole$(printf ':%s' "${rest[@]}")"
done
