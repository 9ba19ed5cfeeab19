#!/usr/bin/env bash
# Builds the image without Docker and without a registry: buildah in chroot isolation, on a Debian that mmdebstrap
# bootstraps from Debian's own packages. Needs root and Debian's buildah and mmdebstrap. Where Docker is,
# `docker build --target cpu --tag pointsman:cpu .` does the same on the base that the Dockerfile names.
#
#   deploy/image/build.sh [--target cpu|cuda] [--tag NAME] [--base IMAGE] [--with-model] [-- MORE BUILDAH ARGUMENTS]
#
# pip's own settings (PIP_*, pip.conf) and http_proxy reach into the build and stay out of the image; MIRROR is another
# Debian mirror, and stays in the base.
set -euo pipefail

target=cpu tag="" base="" with_model=0
while [ $# -gt 0 ]; do
  case "$1" in
    --target) target=$2; shift 2 ;;
    --tag) tag=$2; shift 2 ;;
    --base) base=$2; shift 2 ;;
    --with-model) with_model=1; shift ;;
    --) shift; break ;;
    *) echo "build.sh: unknown argument $1; its first lines say what there is" >&2; exit 64 ;;
  esac
done
tag=${tag:-pointsman:$target}
cd "$(dirname "$0")/../.."
for tool in buildah mmdebstrap; do
  command -v "$tool" > /dev/null || { echo "build.sh: $tool is missing: apt-get install buildah mmdebstrap" >&2; exit 69; }
done
# vfs and chroot work inside containers, where overlays and namespaces often do not.
export STORAGE_DRIVER=${STORAGE_DRIVER:-vfs} BUILDAH_ISOLATION=${BUILDAH_ISOLATION:-chroot}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

bootstrap() { # NAME: python:3.12-slim-bookworm's stand-in
  echo "Bootstrapping $1"
  mmdebstrap --quiet --variant=minbase --include=ca-certificates,python3,python3-venv \
    bookworm "$scratch/base.tar" ${MIRROR:+"$MIRROR"}
  local container
  container=$(buildah from scratch)
  buildah add --quiet "$container" "$scratch/base.tar" / > /dev/null
  buildah config --cmd bash --env PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
  buildah commit --quiet --rm "$container" "$1" > /dev/null
  rm "$scratch/base.tar"
}

# What pip is told here, for the build: its indexes and folders of wheels, and whom it trusts. A variable beats a file,
# and comes first in the list. An index that is a folder of this machine is none in the build.
collect_pip_settings() {
  local key value word seen=" " kept
  echo "[global]" > "$scratch/pip.conf"
  while IFS='=' read -r key value; do
    key=${key##*.} value=${value#\'} value=${value%\'} value=${value//\\n/ }
    case "$seen" in *" $key "*) continue ;; esac
    seen="$seen$key " kept=""
    case "$key" in
      cert)
        settings+=(--secret "id=ca.crt,src=$value")
        kept=" /run/secrets/ca.crt" ;;
      *-url | *-links | *-host | proxy | timeout) # by their ends: an index, further ones, folders, whom to trust
        for word in $value; do
          case "$word" in file:*) continue ;; esac
          [ ! -d "$word" ] || settings+=(--volume "$word:$word:ro")
          kept="$kept $word"
        done ;;
    esac
    [ -z "$kept" ] || echo "$key =$kept" >> "$scratch/pip.conf"
  done < <(python3 -m pip config list 2> /dev/null | sort -u)
  settings+=(--secret "id=pip.conf,src=$scratch/pip.conf")
}

started=$(date +%s)
if [ -z "$base" ]; then
  base=localhost/pointsman-base:bookworm
  buildah inspect --type image "$base" > /dev/null 2>&1 || bootstrap "$base"
fi
settings=()
collect_pip_settings
version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2> /dev/null || echo unknown)
buildah bud --pull-never --format docker --target "$target" --tag "$tag" "${settings[@]}" \
  --build-arg BASE="$base" --build-arg WITH_MODEL="$with_model" \
  --build-arg VERSION="$version" --build-arg REVISION="$revision" "$@" .
size=$(buildah images --format '{{.Size}}' "$tag")
echo "Built $tag in $(($(date +%s) - started)) s: $size"
