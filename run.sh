#!/usr/bin/env bash
# The one entry point: sets up what is missing, then runs a verb. ./run.sh alone lists the verbs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

usage() {
    cat <<'TEXT'
./run.sh VERB [ARGUMENTS]      set-up happens by itself, once

  setup        make .venv with the pinned packages and our build of Horovod
  quickstart   pretrain on scikit-learn's handwritten digits, with two workers; a few minutes on a CPU
  pretrain     CONFIG [key.path=value ...] [-np N] [-H a:4,b:4] [--dry-run] [--print]
  probe        CONFIG model.weights=FILE|none [--labels 1%|25|FILE] [--cached] [-np N]: linear classifier, frozen backbone
  finetune     CONFIG model.weights=FILE|none [--labels 1%|25|FILE] [-np N]: backbone and classifier
  knn          CONFIG model.weights=FILE|none [-np N]: nearest neighbours
  check-data   PATH | CONFIG   decode every image, name the bad ones, and write them into a list to exclude
  features     RUN [key.path=value ...]   embeddings as a file, a map, nearest neighbours, signs of collapse
  export       RUN [key.path=value ...]   the backbone for other tools: safetensors, ONNX, torch.export, MLflow, ...
  results      OUTPUT... | --experiment NAME [--write FILE.md]   runs side by side, with how their backbones were judged
  doctor       check every part of the installation
  ui           [OUTPUT] open MLflow on a run's results, on this machine only
  sync-tracking OUTPUT   send what a tracking server missed
  exactness    how equal runs on 1, 2, 3, 4 workers are; exit 1 if a bound is exceeded
  parity       how far views are from torchvision's on the same draws; exit 1 if a bound is exceeded
  faults       break runs in the ways clusters do; exit 1 if any comes out different from an untouched one
  bench        autocast, combine, elastic, loader, loader-memory, micro-batches, resilience: measurements behind choices
  lint         ruff and mypy
  test         all tests that need no GPU
  test-gpu     the checks that need one
  python       the environment's Python, with this project importable
TEXT
}

say() { printf '%s\n' "$*" >&2; }
fail() { say "error: $*"; exit 2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3; do
        [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' && { echo "$candidate"; return; }
    done
    fail "Python 3.11 is needed: apt-get install python3.11 python3.11-venv python3.11-dev, or PYTHON=/path/to/python3.11"
}

check_tools() {
    local python=$1 missing=()
    command -v g++ >/dev/null || missing+=(g++)
    command -v cmake >/dev/null || missing+=(cmake)
    command -v make >/dev/null || missing+=(make)
    command -v patch >/dev/null || missing+=(patch)
    "$python" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
    [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] || missing+=(python3-dev)
    [ ${#missing[@]} -eq 0 ] || fail "missing system tools; install them with: apt-get install -y ${missing[*]}"
}

# What the environment is made from; a change of any of these makes it anew.
fingerprint() { cat requirements.txt scripts/horovod.patch scripts/build_horovod.sh | sha256sum | cut -d' ' -f1; }

setup() {
    local python stamp=.venv/.made-from
    if [ ! -f "$stamp" ] || [ "$(sed -n 1p "$stamp")" != "$(sha256sum <requirements.txt)" ]; then
        python=$(find_python)
        check_tools "$python"
        say "set-up: Python packages into .venv (several GB the first time)"
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        # Horovod's own line is for scripts/build_horovod.sh: its release does not compile against this torch
        grep -v '^horovod==' requirements.txt >.venv/requirements.txt
        .venv/bin/python -m pip install --quiet --disable-pip-version-check -r .venv/requirements.txt
        sha256sum <requirements.txt >"$stamp"
    fi
    scripts/build_horovod.sh
    { sha256sum <requirements.txt; fingerprint; } >"$stamp"
    say "set-up: ready"
}

ensure() {
    [ "$(sed -n 2p .venv/.made-from 2>/dev/null)" = "$(fingerprint)" ] || setup
}

pipeline() { PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec .venv/bin/python -m pipeline "$@"; }

verb=${1:-}
[ $# -gt 0 ] && shift
case "$verb" in
    "" | help | -h | --help) usage ;;
    setup) setup ;;
    pretrain | probe | finetune | knn) ensure; pipeline launch --verb "$verb" "$@" ;;
    quickstart | check-data | features | export | results | doctor | exactness | parity | faults | bench | ui | sync-tracking) ensure; pipeline "$verb" "$@" ;;
    lint)
        ensure
        .venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy ;;
    test) ensure; exec .venv/bin/python -m pytest tests/unit tests/workers tests/e2e "$@" ;;
    test-gpu) ensure; exec .venv/bin/python -m pytest tests/gpu "$@" ;;
    python) ensure; PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" exec .venv/bin/python "$@" ;;
    *) usage >&2; fail "unknown verb: $verb" ;;
esac
