#!/usr/bin/env bash
# Writes which image the manifests of this folder run.
#
#   deploy/k8s/set-image.sh REGISTRY/PATH@sha256:DIGEST              the runtime image
#   deploy/k8s/set-image.sh --distroless REGISTRY/PATH@sha256:DIGEST the image of the overlay distroless; likewise --ngc
#   deploy/k8s/set-image.sh --kubectl REGISTRY/PATH:TAG              where nodes reach no registry.k8s.io: a copy of kubectl
set -euo pipefail
file=$(dirname "${BASH_SOURCE[0]}")/image/kustomization.yaml
name=deep-ep
case ${1:-} in
  --kubectl)
    name=kubectl
    shift
    ;;
  --distroless | --ngc)
    name=deep-ep-${1#--}
    shift
    ;;
esac
if [ $# -ne 1 ]; then
  echo "set-image: one image is needed, allowed: [--distroless | --ngc | --kubectl] REGISTRY/PATH@sha256:DIGEST" >&2
  exit 2
fi
if [[ $1 =~ ^([a-z0-9][a-zA-Z0-9._:/-]*)@(sha256:[0-9a-f]{64})$ ]]; then
  which="digest: ${BASH_REMATCH[2]}"
elif [ "$name" = kubectl ] && [[ $1 =~ ^([a-z0-9][a-zA-Z0-9._:/-]*):([A-Za-z0-9_][A-Za-z0-9._-]*)$ && $1 != *:latest ]]; then
  which="newTag: ${BASH_REMATCH[2]}"
elif [ "$name" = kubectl ]; then
  echo "set-image: '$1' is no image, allowed: REGISTRY/PATH:TAG with a tag that stays, or REGISTRY/PATH@sha256:DIGEST" >&2
  exit 2
else
  echo "set-image: '$1' is no image by digest, allowed: REGISTRY/PATH@sha256:DIGEST with 64 hexadecimal digits" >&2
  exit 2
fi
awk -v name="$name" -v new="${BASH_REMATCH[1]}" -v which="$which" '
  / - name: / { mine = $3 == name }
  mine && $1 == "newName:" { $0 = "    newName: " new }
  mine && ($1 == "digest:" || $1 == "newTag:") { $0 = "    " which }
  { print }' "$file" >"$file.new"
mv "$file.new" "$file"
echo "$name: $1"
