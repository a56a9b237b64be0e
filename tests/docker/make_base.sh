#!/usr/bin/env bash
# Make the images that the tests stand on where no registry can be reached: Debian with Python by
# debootstrap, and the same with the torch of the given site-packages copied in.
#
#   tests/docker/make_base.sh IMAGE SITE_PACKAGES
set -euo pipefail

image=$1
site_packages=$(realpath "$2")
small=elastic-base:bookworm
certificates=/etc/ssl/certs/ca-certificates.crt

has() { docker image inspect "$1" >/dev/null 2>&1; }

import() {
    docker import --change "ENV PIP_CERT=$certificates" --change "ENV SSL_CERT_FILE=$certificates" - "$1"
}

if has "$small" && has "$image"; then
    echo "$small and $image exist"
    exit 0
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
if has "$small"; then
    container=$(docker create "$small" true)
    docker export "$container" | tar -xf - -C "$root"
    docker rm "$container" >/dev/null
else
    log=$(mktemp)
    debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip bookworm "$root" \
        "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$log" 2>&1 || { tail -20 "$log"; exit 1; }
    rm -rf "$log" "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    # pip inside a build must trust what the host trusts.
    cp "$certificates" "$root$certificates"
    tar -cf - -C "$root" . | import "$small"
fi

# The whole of torch is some 4 GB and lies on this disk already: copied, not downloaded. Packages are
# streamed after the system, so that nothing is written twice.
target=usr/local/lib/python3.11/dist-packages
mkdir -p "$root/$target"
packages=$(cd "$site_packages" && ls -d torch torch-* torchgen torchvision torchvision-* torchvision.libs \
    nvidia nvidia_* cuda* triton triton-* 2>/dev/null || true)
# Names of the system start with "./", so the rewriting reaches the packages only.
# shellcheck disable=SC2086  # a list of names without blanks
tar -cf - --transform "s,^\([^.]\),$target/\1,S" -C "$root" . -C "$site_packages" $packages | import "$image"
