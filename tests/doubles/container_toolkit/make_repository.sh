#!/bin/sh
# Makes a signed apt repository with test doubles of nvidia-container-toolkit on this node. Arguments: versions.
# It is served at http://127.0.0.1:8099/deb; /key.asc is its key, /other.asc another one, /fingerprint the first one's.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
top=/srv/toolkit
if [ ! -e /usr/bin/tcc ] || [ ! -e /usr/bin/gpg ]; then
    DEBIAN_FRONTEND=noninteractive apt-get -q install -y --no-install-recommends gnupg tcc libc6-dev >/dev/null
fi
rm -rf "$top"
mkdir -p "$top/deb" /etc/gpu-double
export GNUPGHOME="$top/gnupg"
mkdir -m 0700 "$GNUPGHOME"
for name in key other; do
    gpg --batch --quiet --passphrase '' --quick-gen-key "$name <$name@example.com>" ed25519 sign 0
    gpg --batch --quiet --armor --export "$name@example.com" >"$top/$name.asc"
done
gpg --batch --with-colons --list-keys key@example.com | awk -F: '/^fpr/ { print $10; exit }' >"$top/fingerprint"

tcc -shared -Wl,-soname,libcuda.so.1 -o "$top/libcuda.so" "$here/libcuda.c"
for version in "$@"; do
    tree="$top/tree"
    rm -rf "$tree"
    mkdir -p "$tree/DEBIAN" "$tree/usr/bin" "$tree/usr/share/gpu-double" "$tree/lib/systemd/system"
    cp "$here/nvidia-ctk" "$here/nvidia-cdi-hook" "$tree/usr/bin/"
    chmod 0755 "$tree/usr/bin/"*
    echo "$version" >"$tree/usr/share/gpu-double/version"
    printf '[Unit]\nDescription=double\n[Service]\nType=oneshot\nExecStart=/bin/false\n[Install]\nWantedBy=multi-user.target\n' \
        >"$tree/lib/systemd/system/nvidia-cdi-refresh.service"
    printf 'Package: nvidia-container-toolkit-base\nVersion: %s-1\nArchitecture: all\nMaintainer: nobody <nobody@example.com>\nDescription: test double\n' \
        "$version" >"$tree/DEBIAN/control"
    dpkg-deb --root-owner-group --build "$tree" "$top/deb" >/dev/null
done
rm -rf "$top/tree"

cd "$top/deb"
for deb in *.deb; do
    dpkg-deb --field "$deb"
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$deb" "$(stat -c %s "$deb")" "$(sha256sum "$deb" | cut -d' ' -f1)"
done >Packages
{
    printf 'Origin: test double\nDate: %s\nSHA256:\n' "$(date -u -R | sed 's/+0000/UTC/')"
    printf ' %s %s Packages\n' "$(sha256sum Packages | cut -d' ' -f1)" "$(stat -c %s Packages)"
} >Release
gpg --batch --quiet --yes --local-user key@example.com --clearsign --output InRelease Release

# the driver's library on the node, for the specifications
install -m 0644 "$top/libcuda.so" /usr/lib/x86_64-linux-gnu/libcuda.so.590.48.01
ldconfig
printf '%s\n' GPU-00000000-0000-0000-0000-000000000010 GPU-00000000-0000-0000-0000-000000000011 >/etc/gpu-double/uuids
gpgconf --kill all
chmod -R a+rX "$top/deb" "$top/key.asc" "$top/other.asc"

cat >/etc/systemd/system/toolkit-repository.service <<END
[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 --directory $top 8099
[Install]
WantedBy=multi-user.target
END
echo 'Acquire::http::Proxy::127.0.0.1 "DIRECT";' >/etc/apt/apt.conf.d/95toolkit-repository
systemctl daemon-reload
systemctl enable --quiet toolkit-repository.service
systemctl restart toolkit-repository.service
