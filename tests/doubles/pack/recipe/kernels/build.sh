#!/usr/bin/env bash
# Every kernel of a profile, as a library beside its source.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
for name in xmoe_p8k xmoe_do_i8 fp8ar fp8arg rowtopk; do
    mkdir -p "$name"
    echo "$name for ${1:?the profile}" >"$name/$name.so"
    echo "built $name"
done
