#!/usr/bin/env bash
# Makes the environment of GPU nodes from requirements.txt: run it on a node with a GPU and the CUDA toolkit (nvcc).
#
#   tools/install_gpu.sh [--venv DIR] [--python PYTHON] [--apex DIR] [--dry-run]
#
#   --venv DIR       the environment, made where it does not exist (default: .venv)
#   --python PYTHON  the interpreter that makes it (default: python3.12)
#   --apex DIR       also build NVIDIA's apex from this checkout of its repository, for fused optimizer kernels; optional
#   --dry-run        print the commands instead of running them
#
# Transformer Engine's torch part is compiled here against the torch that is installed first. NVIDIA's apex is never
# taken from PyPI, where that name is another project. Exit code 2 for a fault of the call, else that of the first
# command that failed.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
python=python3.12
apex=
run=()

refuse() {
  echo "$1" >&2
  exit 2
}

not_from_pypi="apex on PyPI is another project than NVIDIA's; clone github.com/NVIDIA/apex and name it with --apex DIR"
while [ $# -gt 0 ]; do
  case $1 in
    --venv | --python | --apex)
      [ $# -ge 2 ] || refuse "$1 needs a value; see the head of $0"
      declare "${1#--}=$2"
      shift 2
      ;;
    --dry-run)
      run=(echo)
      shift
      ;;
    apex | apex[=\<\>~!]*) refuse "$1: $not_from_pypi" ;;
    *) refuse "$1 is not known; see the head of $0" ;;
  esac
done
if [ "$apex" = pypi ] || [[ $apex == apex==* ]]; then refuse "--apex $apex: $not_from_pypi"; fi
if [ -n "$apex" ] && { [ ! -d "$apex/csrc" ] || [ ! -d "$apex/apex/optimizers" ]; }; then
  refuse "--apex $apex is no checkout of NVIDIA's apex (it lacks csrc or apex/optimizers); $not_from_pypi"
fi
if grep -qiE '^apex\b' requirements.txt; then refuse "requirements.txt lists apex: $not_from_pypi"; fi

# Where an `apex` is installed already, NVIDIA's has its optimizers; looked up without running any of it.
foreign_apex='
import importlib.util, pathlib, sys
spec = importlib.util.find_spec("apex")
places = list(spec.submodule_search_locations or []) if spec else []
sys.exit(0 if spec and not any((pathlib.Path(p) / "optimizers").is_dir() for p in places) else 1)'
[ -x "$venv/bin/python" ] || "${run[@]}" "$python" -m venv "$venv"
if [ -x "$venv/bin/python" ] && "$venv/bin/python" -c "$foreign_apex"; then
  refuse "$venv holds the apex of PyPI, which is another project than NVIDIA's; remove it with $venv/bin/pip uninstall apex"
fi

pip=("${run[@]}" "$venv/bin/python" -m pip --disable-pip-version-check install)
rest=$(mktemp)
trap 'rm -f "$rest"' EXIT
grep -v '^transformer-engine' requirements.txt >"$rest"
engine=$(grep '^transformer-engine' requirements.txt)
"${pip[@]}" -r "$rest"
"${pip[@]}" --no-build-isolation "$engine"
if [ -n "$apex" ]; then
  "${run[@]}" env APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "$venv/bin/python" -m pip --disable-pip-version-check install \
    --no-build-isolation "$apex"
fi
"${pip[@]}" --no-deps -e .
"${run[@]}" "$venv/bin/python" -m megatron_rlvr doctor
