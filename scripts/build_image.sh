#!/usr/bin/env bash
# Builds the Dockerfile's image and runs `doctor` and `quickstart` in it, as the image's user. See docs/containers.md.
#   scripts/build_image.sh [NAME]          default: barlow-horovod
# Uses docker or podman where an engine runs, else buildah (as root), on a base that debootstrap makes.
# Environment:
#   ENGINE=docker|podman|buildah
#   BASE_IMAGE=IMAGE         instead of the Dockerfile's, or of a debootstrap base
#   DEBIAN_MIRROR=URL        for debootstrap; default: the Debian bookworm sources of this machine's apt
#   PASS_MOUNTS="PATH[:PLACE] ..."
#                            files and folders of this machine that the build sees, read-only: pip's configuration,
#                            certificates, folders of wheels. Not with docker. Not over what Debian's packages write:
#                            certificates go to a place of their own, with PIP_CERT and SSL_CERT_FILE naming it.
#   USER_ID=N                number of the image's user; default 1000
#   PIP_INDEX_URL and the other variables that the Dockerfile names as ARG are passed on.
set -euo pipefail
cd "${BASH_SOURCE[0]%/*}/.."

image=${1:-barlow-horovod}
build_args=()   # --build-arg NAME=VALUE
mounts=()       # -v FROM:TO:ro

say() { echo "image: $*"; }
die() { echo "build_image.sh: $*" >&2; exit 2; }
has() { command -v "$1" > /dev/null; }

choose_engine() {
    if has docker && docker info > /dev/null 2>&1; then echo docker
    elif has podman; then echo podman
    elif has buildah; then echo buildah
    else die 'no docker, podman or buildah here; install one, for example: apt-get install -y buildah debootstrap'
    fi
}

timed() {  # NAME COMMAND... → its time and this machine's free disk
    local name=$1 began=$SECONDS
    shift
    "$@"
    say "$name: $((SECONDS - began)) s, $(df -h --output=avail . | tail -n 1 | tr -d ' ') of disk left"
}

pass_on() {  # what of this machine the build may use; sets build_args, mounts
    local name path
    for name in $(sed -nE 's/^ARG ([A-Z_]+).*/\1/p' Dockerfile); do
        if [[ -n ${!name:-} ]]; then build_args+=(--build-arg "$name=${!name}"); fi
    done
    for path in ${PASS_MOUNTS:-}; do
        [[ $path == /* && -e ${path%%:*} ]] || die "PASS_MOUNTS: ${path%%:*} is no existing absolute path"
        mounts+=(-v "${path%%:*}:${path#*:}:ro")
    done
    [[ $engine != docker || ${#mounts[@]} == 0 ]] || die 'PASS_MOUNTS: not with docker; ENGINE=buildah'
}

# apt's own settings (mirrors, proxies, dates) are mounted, not copied: nothing of them stays in the image.
pass_apt() {
    apt-get indextargets --format 'deb $(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' 'Origin: Debian' |
        grep ' bookworm' | sort -u > "$work/sources.list" || true
    if [[ -s $work/sources.list ]]; then mounts+=(-v "$work/sources.list:/etc/apt/sources.list:ro"); fi
    apt-config dump Acquire | grep -vE '^Acquire::(IndexTargets|Changelogs|CompressionTypes)' > "$work/apt.conf"
    mounts+=(-v "$work/apt.conf:/etc/apt/apt.conf.d/90builder:ro")
}

make_base() {  # a minimal Debian bookworm as image $base
    local mirror=${DEBIAN_MIRROR:-} container
    mirror=${mirror:-$(awk '$3 == "bookworm" { print $2; exit }' "$work/sources.list")}
    [[ -n $mirror ]] || die 'apt here knows no Debian bookworm; apt-get update, or DEBIAN_MIRROR=URL or BASE_IMAGE=NAME'
    has debootstrap || die 'debootstrap is missing; apt-get install -y debootstrap, or BASE_IMAGE=IMAGE'
    debootstrap --variant=minbase bookworm "$work/base" "$mirror" > "$work/debootstrap.log" ||
        { tail -n 20 "$work/debootstrap.log" >&2; die 'debootstrap failed'; }
    rm -rf "$work"/base/var/{cache/apt,lib/apt/lists,log}/*
    container=$(buildah from scratch)
    buildah add --quiet "$container" "$work/base" / > /dev/null
    buildah commit --quiet --rm "$container" "$base" > /dev/null
}

build_with_buildah() {
    # chroot and vfs work everywhere root does, in a container or a bare virtual machine, too; they cost time and disk.
    export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=${STORAGE_DRIVER:-vfs}
    work=$(mktemp -d /var/tmp/barlow-image-XXXXXX)
    trap 'rm -rf --one-file-system "$work"' EXIT
    pass_apt
    if [[ -z ${BASE_IMAGE:-} ]]; then
        base=localhost/barlow-base
        timed 'base by debootstrap' make_base
        build_args+=(--build-arg "BASE_IMAGE=$base")
    fi
    timed build buildah bud --pull-never "${mounts[@]}" "${build_args[@]}" -t "$image" .
    say "size: $(buildah images --format '{{.Size}}' "$image")"
    container=$(buildah from --pull-never "$image")
    trap 'buildah rm "$container" > /dev/null; rm -rf --one-file-system "$work"' EXIT
    for verb in doctor quickstart; do
        timed "$verb" buildah run "$container" -- /opt/barlow/run.sh "$verb"  # run knows no entry point
    done
}

build_with_engine() {
    timed build "$engine" build "${mounts[@]}" "${build_args[@]}" -t "$image" .
    say "size: $("$engine" image inspect --format '{{.Size}}' "$image") bytes"
    for verb in doctor quickstart; do
        timed "$verb" "$engine" run --rm --init --shm-size=1g "$image" "$verb"
    done
}

engine=${ENGINE:-$(choose_engine)}
pass_on
case $engine in
    docker | podman) build_with_engine ;;
    buildah) build_with_buildah ;;
    *) die "ENGINE=$engine: must be docker, podman or buildah" ;;
esac
