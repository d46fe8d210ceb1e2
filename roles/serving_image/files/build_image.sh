#!/bin/bash
# Build the CPU serving image; runs as a job on the node, so that it survives the connection that started it.
# Usage: build_image.sh CONTEXT TAG SUITE PACKAGES [WHEEL_FOLDER...]   (PACKAGES: separated by commas)
# A step whose result is there is skipped, so an interrupted build goes on where it was.
set -euo pipefail
context=$1 tag=$2 suite=$3 packages=$4
shift 4
base="$tag-base"
say() { echo "[$SECONDS s] $*"; }

# pip prints two lines a package; a person wants to know how far it is and whatever is unusual.
summarise() {
    awk -v total="$1" -v began="$SECONDS" '
        function say(text) { printf "[%d s] %s\n", began + systime() - start, text; fflush() }
        BEGIN { start = systime() }
        /^(Collecting|Processing) / { if (++seen % 15 == 0) say(seen " of " total " packages fetched"); next }
        /^(  Downloading|  Using cached|Looking in|  Attempting|    |WARNING: Location)/ { next }
        /^Installing collected/ { say("installing " total " packages"); next }
        /^Successfully installed/ { say("installed " total " packages"); next }
        { print; fflush() }'
}

if podman image exists "$tag"; then
    say "$tag is there"
    exit 0
fi
if podman image exists "$base"; then
    say "step 1 of 2: the base system is there: $base"
else
    say "step 1 of 2: the base system, Debian $suite; about a minute"
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
    TMPDIR=$context mmdebstrap --quiet --variant=minbase --mode=root --include="$packages" \
        --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*' \
        "$suite" "$context/base.tar" ${sources[@]+"${sources[@]}"}
    podman import --quiet "$context/base.tar" "$base" >/dev/null
    rm -f "$context/base.tar"
fi

count=$(grep -c == "$context/lock.txt")
say "step 2 of 2: $count pinned Python packages; 3 to 5 minutes"
# The site's way to packages: copied into the context for this build, never into the image.
cp /etc/ssl/certs/ca-certificates.crt "$context/ca-certificates.crt"
if [ -e /etc/pip.conf ]; then cp /etc/pip.conf "$context/pip.conf"; else : >"$context/pip.conf"; fi
volumes=()
for folder in "$@"; do
    volumes+=(--volume "$folder:$folder:ro")
    printf '[install]\nfind-links = %s\n' "$folder" >>"$context/pip.conf"
done
# chroot isolation: the build also works where the node is itself a container.
podman build --isolation chroot --build-arg BASE="$base" "${volumes[@]}" --file "$context/Containerfile" --tag "$tag" "$context" \
    2>&1 | summarise "$count"
rm -f "$context/pip.conf"
say "built $tag"
