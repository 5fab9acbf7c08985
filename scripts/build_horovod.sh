#!/usr/bin/env bash
# Builds the Horovod that requirements.txt pins, with our patch, and installs it for $PYTHON. See docs/horovod.md.
#   scripts/build_horovod.sh [--print-options]      --print-options: say what would be built, and stop
# Environment: PYTHON, HOROVOD_BUILD=auto|cpu|nccl, HOROVOD_WHEEL_CACHE, HOROVOD_BUILD_CUDA_CC_LIST=80,90,
#   HOROVOD_WITH_MPI=1 or HOROVOD_WITHOUT_MPI=1, CUDA_HOME, MAKEFLAGS.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
PYTHON=${PYTHON:-$root/.venv/bin/python}
patch_file=$root/scripts/horovod.patch
cache=${HOROVOD_WHEEL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/barlow-horovod}
want=${HOROVOD_BUILD:-auto}

options=()   # NAME=value, given to the build and part of the cache key
paths=()     # NAME=value, given to the build, not part of the key: where things lie on this machine
toolkit=''   # CUDA toolkit folder of an NCCL build; empty until the PyPI toolkit is laid out
nvcc=''      # version of its nvcc

say() { echo "horovod: $*"; }
die() { echo "build_horovod.sh: $*" >&2; exit 2; }

requirement() {  # NAME → version pinned in requirements.txt
    local version
    version=$(sed -nE "s/^(# toolkit: )?$1==([^ ;]+).*/\2/p" "$root/requirements.txt")
    [[ -n $version ]] || die "requirements.txt pins no $1"
    echo "$version"
}

read_facts() {  # sets torch, torch_cuda, abi, platform, prefix, installed, include, nccl_dir, nccl_version, cflags
    [[ -x $(command -v "$PYTHON") ]] || die "PYTHON=$PYTHON does not exist; make the virtual environment first"
    # torch/version.py is run without importing torch: 0.1 s instead of several.
    facts=$("$PYTHON" - <<'PY'
import importlib.metadata as metadata, platform, runpy, shlex, sys, sysconfig
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
facts = dict(torch="", torch_cuda="", nccl_version="", nccl_dir="")
if version("torch"):
    torch = runpy.run_path(str(metadata.distribution("torch").locate_file("torch/version.py")))
    facts |= dict(torch=torch["__version__"], torch_cuda=torch["cuda"] or "")
    nccl = "nvidia-nccl-cu" + facts["torch_cuda"].split(".")[0]
    if version(nccl):
        facts |= dict(nccl_version=version(nccl), nccl_dir=metadata.distribution(nccl).locate_file("nvidia/nccl"))
facts |= dict(abi=sysconfig.get_config_var("SOABI"), prefix=sys.prefix, installed=version("horovod"),
              include=sysconfig.get_path("include"), cflags="",
              platform="-".join([sysconfig.get_platform(), *platform.libc_ver()]))
if platform.machine() == "x86_64":  # Horovod would ask the compiler of this machine; asked here, it is in the key
    flags = open("/proc/cpuinfo").read().split()
    facts["cflags"] = " ".join("-m" + flag for flag in ("f16c", "avx", "fma") if flag in flags)
for name, value in facts.items():
    print(f"{name}={shlex.quote(str(value))}")
PY
    )
    eval "$facts"
    [[ -n $torch ]] || die "torch is not installed for $PYTHON; install requirements.txt first"
}

has_gpu() { [[ -e /dev/nvidia0 ]] || { command -v nvidia-smi > /dev/null && nvidia-smi -L > /dev/null 2>&1; }; }

nvcc_version() { "$1/bin/nvcc" --version 2> /dev/null | sed -nE 's/.* V([0-9.]+)$/\1/p'; }

missing_piece() {  # DIR → the first piece that the build needs and DIR lacks; nothing if it is complete
    local version piece
    version=$(nvcc_version "$1") || true
    [[ -n $version ]] || { echo 'a working bin/nvcc'; return; }
    [[ ${version%%.*} == "${torch_cuda%%.*}" ]] || { echo "CUDA ${torch_cuda%%.*}, torch's (it has $version)"; return; }
    for piece in lib64/libcudart.so lib64/libcudart_static.a lib64/libcudadevrt.a include/cuda_runtime.h \
        include/crt/host_config.h include/cuda_fp16.h include/nv/target include/nvtx3/nvToolsExt.h; do
        # CUDA 13 has CCCL (nv/target) in a folder of its own, which nvcc adds by itself.
        [[ -e $1/$piece || -e $1/${piece/include/include\/cccl} ]] || { echo "$piece"; return; }
    done
}

toolkit_candidates() {
    printf '%s\n' "${CUDA_HOME:-}" "${CUDAToolkit_ROOT:-}"
    # nvcc on the PATH may be a link or a wrapper: it says itself where its toolkit is.
    if command -v nvcc > /dev/null; then nvcc --dryrun x.cu 2>&1 | sed -nE 's/^#\$ _HERE_=(.*)\/bin$/\1/p'; fi
    echo /usr/local/cuda
}

find_toolkit() {  # sets toolkit to the first complete one; lacks: what was wrong with the first one that is not
    local dir missing
    lacks=''
    while read -r dir; do
        [[ -n $dir && -d $dir ]] || continue
        missing=$(missing_piece "$dir")
        if [[ -z $missing ]]; then toolkit=$(cd "$dir" && pwd) nvcc=$(nvcc_version "$dir"); return; fi
        lacks=${lacks:-$dir lacks $missing}
    done < <(toolkit_candidates)
}

decide() {  # auto → nccl or cpu, with the reason; sets build, why
    build=nccl why="HOROVOD_BUILD=$want"
    local cannot=''
    if [[ -z $torch_cuda ]]; then cannot="torch $torch is a CPU build"
    elif [[ -z $nccl_version ]]; then cannot="nvidia-nccl-cu${torch_cuda%%.*} is not installed for $PYTHON"
    fi
    case $want in
        cpu) build=cpu; return ;;
        nccl) [[ -z $cannot ]] || die "HOROVOD_BUILD=nccl is not possible: $cannot" ;;
        auto) if [[ -n $cannot ]]; then build=cpu why=$cannot; return; fi ;;
        *) die "HOROVOD_BUILD=$want: must be auto, cpu or nccl" ;;
    esac
    find_toolkit
    if [[ -n $toolkit ]]; then why="CUDA toolkit in $toolkit"
    elif [[ $want == nccl ]] || has_gpu; then why="toolkit from PyPI wheels${lacks:+ ($lacks)}"
    else build=cpu why="no GPU, ${lacks:-no CUDA toolkit}"
    fi
}

choose_options() {
    options=(HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1)
    [[ -z $cflags ]] || options+=("HOROVOD_BUILD_ARCH_FLAGS=$cflags")
    mpi=''
    if [[ ${HOROVOD_WITHOUT_MPI:-} != 1 ]] && command -v mpicxx > /dev/null; then
        # Open MPI and MPICH, and their major versions, are not binary compatible: the version is part of the key.
        mpi=$(mpirun --version 2>&1 | sed -n 1p)
        options+=(HOROVOD_WITH_MPI=1)
    elif [[ ${HOROVOD_WITH_MPI:-} == 1 ]]; then die 'HOROVOD_WITH_MPI=1, but there is no mpicxx on the PATH'
    else options+=(HOROVOD_WITHOUT_MPI=1)
    fi
    if [[ $build == nccl ]]; then choose_cuda_options; fi
}

choose_cuda_options() {
    local capabilities=${HOROVOD_BUILD_CUDA_CC_LIST:-}
    nvcc=${nvcc:-$(requirement nvidia-cuda-nvcc)}
    options+=(HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=shared)
    # One GPU kind is enough on the machine that has it. Without one (an image), all that this nvcc knows.
    if [[ -z $capabilities ]] && has_gpu; then
        capabilities=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2> /dev/null |
            tr -d . | sort -nu | paste -sd,) || true
    fi
    [[ -z $capabilities ]] || options+=("HOROVOD_BUILD_CUDA_CC_LIST=$capabilities")
}

describe() {  # everything the wheel depends on, one NAME=value a line; its hash is the key
    printf '%s\n' "horovod=$version" "torch=$torch" "abi=$abi" "platform=$platform" \
        "patch=$(sha256sum < "$patch_file" | cut -c1-16)" "mpi=$mpi"
    if [[ $build == nccl ]]; then printf '%s\n' "nvcc=$nvcc" "nccl=$nccl_version"; fi
    printf '%s\n' "${options[@]}"
}

check_tools() {
    local tool packages=''
    for tool in cmake g++ make patch; do command -v "$tool" > /dev/null || packages+=" $tool"; done
    [[ -e $include/Python.h ]] || packages+=' python3-dev'
    [[ -z $packages ]] || die "missing:$packages; install with: apt-get install -y$packages"
}

lay_out_toolkit() {  # NVIDIA's wheels all unpack into nvidia/cu13, which with two links is a toolkit
    local pins tmp
    mapfile -t pins < <(sed -n 's/^# toolkit: //p' "$root/requirements.txt")
    toolkit=$cache/toolkit-$(printf '%s\n' "$platform" "${pins[@]}" | sha256sum | cut -c1-16)
    if [[ ! -d $toolkit ]]; then
        say "CUDA toolkit from ${#pins[@]} PyPI wheels → $toolkit"
        tmp=$work/toolkit
        "$PYTHON" -m pip install --quiet --no-deps --target "$tmp" "${pins[@]}" >> "$log" 2>&1
        ln -s lib "$tmp/nvidia/cu13/lib64"
        ln -sf libcudart.so.13 "$tmp/nvidia/cu13/lib/libcudart.so"
        move_into_place "$tmp/nvidia/cu13" "$toolkit"
    fi
    local missing
    missing=$(missing_piece "$toolkit")
    [[ -z $missing ]] || { echo "the toolkit from PyPI wheels lacks $missing" >> "$log"; return 1; }
}

# Renames a finished folder. Where another build was faster, its folder stays and ours goes with the work folder.
move_into_place() { mv -T "$1" "$2" 2> /dev/null || [[ -d $2 ]]; }

locate_cuda() {
    [[ -n $toolkit ]] || lay_out_toolkit
    mkdir -p "$work/nccl"
    ln -s "$nccl_dir/lib/libnccl.so.2" "$work/nccl/libnccl.so"  # the wheel has no name to link by
    paths+=("CUDA_HOME=$toolkit" "CUDAToolkit_ROOT=$toolkit" "HOROVOD_CUDA_HOME=$toolkit" "CUDACXX=$toolkit/bin/nvcc"
        "LIBRARY_PATH=$toolkit/lib64" "PATH=$toolkit/bin:$PATH"
        "HOROVOD_NCCL_INCLUDE=$nccl_dir/include" "HOROVOD_NCCL_LIB=$work/nccl")
}

fetch_source() {  # → $work/horovod-VERSION, patched
    "$PYTHON" -m pip download --no-deps --no-binary horovod --no-build-isolation -d "$work" "horovod==$version"
    tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
    patch -d "$work/horovod-$version" -p1 --fuzz=0 < "$patch_file"
}

compile() {  # → $work/out/horovod-*.whl
    local name drop=()
    # Horovod reads some thirty HOROVOD_* variables while it builds: none but ours may reach it.
    for name in ${!HOROVOD_@}; do drop+=(-u "$name"); done
    # CMake 4 refuses the third-party Gloo's "cmake_minimum_required(VERSION 2.8)" unless told otherwise. Horovod prints
    # source files' names in its warnings: without the work folder's.
    env "${drop[@]}" "${options[@]}" "${paths[@]}" MAKEFLAGS="${MAKEFLAGS:--j$(nproc)}" \
        CMAKE_POLICY_VERSION_MINIMUM=3.5 CXXFLAGS="${CXXFLAGS:-} -ffile-prefix-map=$work/=" \
        "$PYTHON" -m pip wheel -v --no-deps --no-build-isolation -w "$work/out" "$work/horovod-$version"
}

check_wheel() {  # a wheel that lacks what was asked for must not reach the cache
    "$PYTHON" -m pip install --quiet --no-deps --no-index --target "$work/site" "$work"/out/horovod-*.whl
    cd "$work" && PYTHONPATH=$work/site "$PYTHON" - "$build" "$mpi" <<'PY'
import sys
import horovod.torch as hvd
built = {"gloo": hvd.gloo_built(), "nccl": bool(hvd.nccl_built()), "mpi": hvd.mpi_built()}
wanted = {"gloo": True, "nccl": sys.argv[1] == "nccl", "mpi": bool(sys.argv[2])}
assert built == wanted, f"built {built}, wanted {wanted}"
PY
}

write_info() {  # what `doctor` reports
    describe | "$PYTHON" -c '
import json, sys
key, build, seconds = sys.argv[1:]
facts = dict(line.rstrip("\n").split("=", 1) for line in sys.stdin)
options = {name: facts.pop(name) for name in list(facts) if name.startswith("HOROVOD_")}
info = dict(key=key, build=build, **{name: value or None for name, value in facts.items()}, options=options,
            build_seconds=int(seconds))
print(json.dumps(info, indent=2))' "$key" "$build" "$SECONDS" > "$work/out/horovod-build.json"
}

build_wheel() {
    check_tools
    mkdir -p "$cache/logs"
    work=$(mktemp -d "$cache/.build-XXXXXX")
    trap 'rm -rf "$work"' EXIT
    log=$cache/logs/$(date +%Y%m%d-%H%M%S)-$key-$$.log
    say "building $version ($build: $why); some minutes; log: $log"
    SECONDS=0
    # A subshell of its own: bash ignores -e in a function called from a condition.
    set +e
    (
        set -e
        exec 3>&1 > "$log" 2>&1
        if [[ $build == nccl ]]; then locate_cuda >&3; fi
        fetch_source
        compile
        check_wheel
        write_info
    )
    local status=$?
    set -e
    if ((status != 0)); then
        tail -n 30 "$log" >&2
        die "the build failed; the whole log: $log"
    fi
    move_into_place "$work/out" "$cache/$key"
    say "built in ${SECONDS} s, $(du -h "$cache/$key"/*.whl | cut -f1)"
}

stamp() { sed -nE 's/^  "key": "(.*)",$/\1/p' "$prefix/horovod-build.json" 2> /dev/null || true; }

install_wheel() {
    # The stamp goes first and comes last: an interrupted install is repeated, not believed.
    rm -f "$prefix/horovod-build.json"
    "$PYTHON" -m pip install --quiet --no-deps --no-index --force-reinstall "$cache/$key"/horovod-*.whl
    cp "$cache/$key/horovod-build.json" "$prefix/horovod-build.json.$$"
    mv "$prefix/horovod-build.json.$$" "$prefix/horovod-build.json"
    say "installed $version ($build${mpi:+, MPI}) from $cache/$key"
}

main() {
    [[ $# == 0 || "$*" == --print-options ]] || die "unknown argument: $*"
    version=$(requirement horovod)
    read_facts
    decide
    choose_options
    local description
    description=$(describe)
    key=$(sha256sum <<< "$description" | cut -c1-16)
    if [[ $# == 1 ]]; then
        printf '%s\n' "build=$build ($why)" "$description" "key=$key" "cache=$cache"
    elif [[ $installed == "$version" && $(stamp) == "$key" ]]; then
        say "$installed ($build) is installed"
    else
        [[ -d $cache/$key ]] || build_wheel
        install_wheel
    fi
}

main "$@"
