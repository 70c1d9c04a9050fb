# shellcheck shell=bash
# For the scripts of this folder: checks of their variables. Each says what came and what is allowed.

problems=0
problem() {
  echo "$(basename "$0"): $1" >&2
  problems=$((problems + 1))
}

# wants NAME PATTERN EXAMPLE: the variable must be set and look like that.
wants() {
  if [ -z "${!1:-}" ]; then
    problem "$1 is not set, allowed: such as $3"
  elif ! [[ ${!1} =~ ^($2)$ ]]; then
    problem "$1 is '${!1}', allowed: such as $3"
  fi
}

wants_cluster() {
  wants PROJECT_ID '[a-z][-a-z0-9:.]*[a-z0-9]' my-project
  wants REGION '[a-z]+-[a-z]+[0-9]+' asia-southeast1
  wants CLUSTER_NAME '[a-z][-a-z0-9]*' my-cluster
}

wants_networks() {
  wants NETWORK_PREFIX '[a-z][-a-z0-9]{0,40}' my-cluster
}

wants_zone() {
  wants ZONE '[a-z]+-[a-z]+[0-9]+-[a-z]' asia-southeast1-b
  if [ -n "${ZONE:-}" ] && [ -n "${REGION:-}" ] && [ "${ZONE%-*}" != "$REGION" ]; then
    problem "ZONE $ZONE is not in REGION $REGION"
  fi
}

wants_pool() {
  wants NODE_POOL '[a-z][-a-z0-9]{0,38}[a-z0-9]|[a-z]' a4
}

wants_nodes() {
  wants NODES '[1-9][0-9]{0,2}' 2
  # May be empty: the cluster's own.
  [ -z "${NODE_VERSION:-}" ] || wants NODE_VERSION '1\.[0-9]+\.[0-9]+-gke\.[0-9]+' 1.33.5-gke.1162000
  wants IMAGE_TYPE 'COS_CONTAINERD|UBUNTU_CONTAINERD' 'COS_CONTAINERD, UBUNTU_CONTAINERD'
  GPU_DRIVER_VERSION=${GPU_DRIVER_VERSION:-latest}
  wants GPU_DRIVER_VERSION 'latest|default' 'latest, default'
  wants PROVISIONING 'spot|on-demand|reservation' 'spot, on-demand, reservation'
  if [ "${PROVISIONING:-}" = reservation ] && [ -z "${RESERVATION_NAME:-}" ]; then
    problem "PROVISIONING is reservation, and RESERVATION_NAME names none"
  fi
  # What A4 needs: GKE 1.32.1 at least for B200.
  if [[ ${NODE_VERSION:-} =~ ^1\.([0-9]+)\. ]] && [ "${BASH_REMATCH[1]}" -lt 32 ]; then
    problem "NODE_VERSION is '$NODE_VERSION', allowed: 1.32 or later, which knows B200"
  fi
}

stop_if_wrong() {
  [ $problems -eq 0 ] || exit 2
}

# Does it, or with --dry-run prints it, a command that can be pasted.
dry_run=0
do_or_print() {
  if [ $dry_run -eq 0 ]; then
    "$@"
    return
  fi
  local word line=
  for word in "$@"; do
    case $word in
      --*)
        line+=$' \\\n '
        ;;
    esac
    line+=" $(printf %q "$word")"
  done
  printf '%s\n' "${line# }"
}
