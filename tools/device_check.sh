#!/usr/bin/env bash
# Checks the loop on one GPU without a network, or with --cpu on the CPU: see docs/device_check.md.
#
#   tools/device_check.sh [--cpu] [--wheels DIR] [--python PYTHON] [--write-golden]
#
#   --wheels DIR     install the wheels of DIR into a scratch directory and use them from there
#   --python PYTHON  the interpreter that has torch (default: python3)
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=python3
wheels=
arguments=()
while [ $# -gt 0 ]; do
  case $1 in
    --wheels | --python)
      [ $# -ge 2 ] || { echo "$1 needs a value" >&2; exit 2; }
      if [ "$1" = --wheels ]; then wheels=$2; else python=$2; fi
      shift 2
      ;;
    *)
      arguments+=("$1")
      shift
      ;;
  esac
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export PYTHONPATH="$root:$root/examples"
if [ -n "$wheels" ]; then
  ls "$wheels"/*.whl >/dev/null 2>&1 || { echo "--wheels $wheels holds no wheel" >&2; exit 2; }
  "$python" -m pip --disable-pip-version-check install -q --no-index --no-deps --target "$scratch/packages" "$wheels"/*.whl
  PYTHONPATH="$PYTHONPATH:$scratch/packages"
fi
# One rank talks to itself: the loopback interface is enough. TF32 stays off even where a site switches it on.
export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo NVIDIA_TF32_OVERRIDE=0 CUDA_DEVICE_MAX_CONNECTIONS=1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
"$python" "$root/tools/device_check.py" --work "$scratch/work" "${arguments[@]}"
