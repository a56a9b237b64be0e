#!/usr/bin/env bash
# Make the base image of the tests where no registry can be reached: Debian by
# debootstrap, with the torch of the given site-packages copied in.
#
#   tests/docker/make_base.sh IMAGE SITE_PACKAGES
set -euo pipefail

image=$1
site_packages=$(realpath "$2")

if docker image inspect "$image" >/dev/null 2>&1; then
    echo "$image exists"
    exit 0
fi

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
debootstrap --variant=minbase --include=ca-certificates,python3,python3-pip bookworm "$root" \
    "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$root.log" 2>&1 || { tail -20 "$root.log"; exit 1; }
rm -f "$root.log"
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
# pip inside a build must trust what the host trusts.
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"

# The whole of torch is some 4 GB and lies on this disk already: copied, not downloaded. Packages are
# streamed after the system, so that nothing is written twice.
target=usr/local/lib/python3.11/dist-packages
mkdir -p "$root/$target"
packages=$(cd "$site_packages" && ls -d torch torch-* torchgen torchvision torchvision-* torchvision.libs \
    nvidia nvidia_* cuda* triton triton-* 2>/dev/null || true)
# Names of the system start with "./", so the rewriting reaches the packages only.
# shellcheck disable=SC2086  # a list of names without blanks
tar -cf - --transform "s,^\([^.]\),$target/\1,S" -C "$root" . -C "$site_packages" $packages |
    docker import --change 'ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt' \
    --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' - "$image"
