#!/usr/bin/env bash
# Collects what a run left, from a workstation:
#
#   deploy/k8s/collect-logs.sh OUT [--namespace NAME] [--selector LABELS]
#
# OUT/nccl-test-results.txt and OUT/connectivity-test.log  the testbed's stages, taken from its first pod's log
# OUT/pod-logs/coordinator.log, OUT/pod-logs/worker-N.log  the logs of the pods of a Job by their index; of others, NAME.log
# OUT/pods.txt, OUT/events.txt, OUT/nodes.txt              the states
set -euo pipefail
usage() {
  echo "collect-logs: $1, allowed: OUT [--namespace NAME] [--selector LABELS]" >&2
  exit 2
}
out=
namespace=deep-ep
selector=app.kubernetes.io/name=deep-ep
while [ $# -gt 0 ]; do
  case $1 in
    --namespace | --selector)
      [ $# -ge 2 ] || usage "$1 needs a value"
      if [ "$1" = --namespace ]; then namespace=$2; else selector=$2; fi
      shift 2
      ;;
    -*) usage "'$1' is unknown" ;;
    *)
      [ -z "$out" ] || usage "'$1' is unexpected"
      out=$1
      shift
      ;;
  esac
done
[ -n "$out" ] || usage "the folder is missing"
mkdir -p "$out/pod-logs"

failed=0
# states FILE ARGUMENT...: what kubectl get says, into a file. Who may not see it still gets the rest.
states() {
  if ! kubectl get "${@:2}" >"$out/$1"; then
    echo "collect-logs: kubectl get $2 failed, so $1 is not whole" >&2
    failed=1
  fi
}
states pods.txt pods -n "$namespace" -l "$selector" -o wide
states events.txt events -n "$namespace" --sort-by=.metadata.creationTimestamp
states nodes.txt nodes -L cloud.google.com/gce-topology-block,cloud.google.com/gce-topology-subblock,cloud.google.com/gce-topology-host

# Prints what the log on standard input has between the lines "=== begin NAME" and "=== end NAME".
section() {
  awk -v name="$1" '$0 == "=== end " name { on = 0 } on { print } $0 == "=== begin " name { on = 1 }'
}

declare -A taken=()
pods=$(kubectl get pods -n "$namespace" -l "$selector" \
  -o 'jsonpath={range .items[*]}{.metadata.name} {.metadata.annotations.batch\.kubernetes\.io/job-completion-index}{"\n"}{end}')
while read -r pod index; do
  [ -n "$pod" ] || continue
  case $index in
    "") log=$pod.log ;;
    0) log=coordinator.log ;;
    *) log=worker-$index.log ;;
  esac
  # Two Jobs at once: keep both.
  [ -z "${taken[$log]:-}" ] || log=$pod.log
  taken[$log]=1
  if ! kubectl logs -n "$namespace" "$pod" --all-containers --tail=-1 >"$out/pod-logs/$log"; then
    echo "collect-logs: pod $pod gave no log" >&2
    failed=1
  fi
  if [ "$index" = 0 ]; then
    for name in nccl-test-results.txt connectivity-test.log; do
      section "$name" <"$out/pod-logs/$log" >"$out/$name.new"
      if [ -s "$out/$name.new" ]; then mv "$out/$name.new" "$out/$name"; else rm "$out/$name.new"; fi
    done
  fi
done <<<"$pods"
find "$out" -type f | sort
exit $failed
