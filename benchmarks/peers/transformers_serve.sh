#!/usr/bin/env bash
# Starts `transformers serve` with continuous batching on the CPU, to be measured beside ktserve.
#
#   benchmarks/peers/transformers_serve.sh VENV MODEL_DIR [PORT]
#
# VENV       a directory for its own virtual environment; made on the first start (about 1.2 GB)
# MODEL_DIR  the model as a safetensors directory, the same that ktserve serves
# PORT       default 30100, on 127.0.0.1
#
# Environment:
#   PYTHON   the interpreter that the environment is made with, python3 if unset
#   DTYPE    float32 if unset
#   THREADS  threads of PyTorch; its own choice if unset
#
# PyPI's torch for Linux brings CUDA libraries along. Where PyTorch's own CPU index can be reached,
# PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves the space.
set -euo pipefail

TORCH="torch==2.13.0"
TRANSFORMERS="transformers[serving]==5.24.0"

if [[ $# -lt 2 || $# -gt 3 ]]; then
    sed -n '2,/^set /p' "$0" | sed '$d; s/^# \{0,1\}//' >&2
    exit 2
fi
venv=$1
model=$2
port=${3:-30100}

if [[ ! -f "$model/config.json" ]]; then
    echo "$0: MODEL_DIR $model holds no config.json; give a safetensors directory" >&2
    exit 2
fi
model=$(cd "$model" && pwd)

# The mark is written last, so that an installation that was cut short is done again.
mark="$venv/installed"
wanted="$TORCH $TRANSFORMERS"
if [[ ! -f "$mark" || "$(<"$mark")" != "$wanted" ]]; then
    "${PYTHON:-python3}" -m venv --clear "$venv"
    "$venv/bin/python" -m pip install --quiet "$TORCH" "$TRANSFORMERS"
    echo "$wanted" >"$mark"
fi

if [[ -n "${THREADS:-}" ]]; then
    export OMP_NUM_THREADS=$THREADS MKL_NUM_THREADS=$THREADS
fi
# The model is a directory: nothing is to be looked up.
export HF_HUB_OFFLINE=1

exec "$venv/bin/transformers" serve "$model" \
    --continuous-batching \
    --device cpu \
    --dtype "${DTYPE:-float32}" \
    --attn-implementation sdpa \
    --host 127.0.0.1 \
    --port "$port"
