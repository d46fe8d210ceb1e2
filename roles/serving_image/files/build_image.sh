#!/bin/bash
# Build the CPU serving image; runs as a job on the node, so that it survives the connection that started it.
# Usage: build_image.sh CONTEXT TAG SUITE PACKAGES [WHEEL_FOLDER...]   (PACKAGES: separated by commas)
# CONTEXT also has request.json, the patches, and the program that checks and applies them.
# A step whose result is there is skipped, so an interrupted build goes on where it was.
set -euo pipefail
context=$1 tag=$2 suite=$3 packages=$4
shift 4
base="$tag-base"
log=$context/build.log
say() { echo "[$SECONDS s] $*"; }

# Run a command, and every 15 seconds show how far it is: the last line that it printed.
run() {
    local what=$1 next=$((SECONDS + 15)) code=0
    shift
    say "$what"
    "$@" >"$log" 2>&1 &
    while kill -0 $! 2>/dev/null; do
        sleep 1
        if ((SECONDS >= next)); then
            say "$what: $(tail -n 1 "$log" | cut -c 1-100)"
            next=$((SECONDS + 15))
        fi
    done
    wait $! || code=$?
    if ((code)); then
        tail -n 30 "$log"
        say "$what: failed with exit code $code; all of it: $log"
        exit "$code"
    fi
}

if podman image exists "$tag"; then
    say "$tag is there"
    exit 0
fi
if podman image exists "$base"; then
    say "step 1 of 2: the base system is there: $base"
else
    # The operator's sources; else the node's own where it is the same release; else mmdebstrap's default mirror.
    sources=()
    if [ -s "$context/sources.list" ]; then
        sources=("$context/sources.list")
    elif grep -q "^VERSION_CODENAME=$suite\$" /etc/os-release; then
        for file in /etc/apt/sources.list /etc/apt/sources.list.d/debian.sources; do
            if [ -s "$file" ]; then sources+=("$file"); fi
        done
    fi
    # TMPDIR: /tmp may be small and in memory.
    export TMPDIR=$context
    run "step 1 of 2: the base system, Debian $suite" mmdebstrap --variant=minbase --mode=root --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$context/base.tar" ${sources[@]+"${sources[@]}"}
    podman import --quiet "$context/base.tar" "$base" >/dev/null 2>&1
    rm -f "$context/base.tar"
fi

# The site's way to packages: copied into the context for this build, never into the image.
cp /etc/ssl/certs/ca-certificates.crt "$context/ca-certificates.crt"
if [ -e /etc/pip.conf ]; then cp /etc/pip.conf "$context/pip.conf"; else : >"$context/pip.conf"; fi
volumes=()
for folder in "$@"; do
    volumes+=(--volume "$folder:$folder:ro")
    grep -qx -- "--find-links $folder" "$context/lock.txt" || echo "--find-links $folder" >>"$context/lock.txt"
done
image_program() { PYTHONPATH=$context/program python3 -m gpu_node_image --folder "$context" "$@"; }
labels=$(image_program labels)
mapfile -t labels <<<"$labels"
# chroot isolation: the build also works where the node is itself a container. The name comes last, from what proved the
# patches to be in: nothing half-built has it.
run "step 2 of 2: $(grep -c == "$context/lock.txt") pinned Python packages" \
    podman build --isolation chroot --build-arg BASE="$base" ${volumes[@]+"${volumes[@]}"} "${labels[@]}" \
    --file "$context/Containerfile" --iidfile "$context/image-id" "$context"
rm -f "$context/pip.conf"
image=$(<"$context/image-id")
image_program finish "${image#sha256:}"
