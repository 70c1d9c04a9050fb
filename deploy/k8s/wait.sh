#!/usr/bin/env bash
# Waits until a run has ended, prints the log of its first pod, and says how it ended. `kubectl wait` waits for one end only:
# of a Job that failed it learns nothing.
#
#   deploy/k8s/wait.sh job/NAME|jobset/NAME|pod/NAME [--namespace NAME] [--timeout SECONDS] [--every SECONDS]
#
# Status: 0 the run was right; 1 it failed, or there is no end after the timeout; 2 wrong arguments.
set -euo pipefail
usage() {
  echo "wait: $1, allowed: job/NAME|jobset/NAME|pod/NAME [--namespace NAME] [--timeout SECONDS] [--every SECONDS]" >&2
  exit 2
}
object=
namespace=deep-ep
timeout=1900 # a little more than the Job's own deadline
every=5
while [ $# -gt 0 ]; do
  case $1 in
    --namespace | --timeout | --every)
      [ $# -ge 2 ] || usage "$1 needs a value"
      if [ "$1" = --namespace ]; then
        namespace=$2
      elif ! [[ $2 =~ ^[1-9][0-9]{0,5}$ ]]; then
        usage "$1 is '$2', which is no number of seconds"
      elif [ "$1" = --timeout ]; then
        timeout=$2
      else
        every=$2
      fi
      shift 2
      ;;
    -*) usage "'$1' is unknown" ;;
    *)
      [ -z "$object" ] || usage "'$1' is unexpected"
      object=$1
      shift
      ;;
  esac
done
name=${object#*/}
first=batch.kubernetes.io/job-completion-index=0
case $object in
  job/?*) pods=(-l "batch.kubernetes.io/job-name=$name,$first") ;;
  jobset/?*) pods=(-l "jobset.sigs.k8s.io/jobset-name=$name,$first") ;;
  pod/?*) pods=("$name") ;;
  *) usage "the object is '$object'" ;;
esac

# What holds of it, a word a line.
state() {
  if [[ $object == pod/* ]]; then
    kubectl get "$object" -n "$namespace" --request-timeout 30s -o 'jsonpath={.status.phase}'
  else
    kubectl get "$object" -n "$namespace" --request-timeout 30s \
      -o 'jsonpath={range .status.conditions[?(@.status=="True")]}{.type}{"\n"}{end}'
  fi
}
status=
refused=0
until [ -n "$status" ]; do
  if words=$(state); then
    refused=0
    case $'\n'$words$'\n' in
      *$'\nFailed\n'*) status=1 ;;
      *$'\nComplete\n'* | *$'\nCompleted\n'* | *$'\nSucceeded\n'*) status=0 ;;
    esac
  else
    # A cluster may be out of reach for a moment.
    refused=$((refused + 1))
    if [ $refused -ge 3 ]; then
      echo "wait: $object in namespace $namespace cannot be looked at" >&2
      exit 1
    fi
  fi
  if [ -z "$status" ]; then
    if [ $SECONDS -ge "$timeout" ]; then
      echo "wait: $object in namespace $namespace has not ended after $timeout s" >&2
      kubectl get pods -n "$namespace" -o wide >&2 || true
      exit 1
    fi
    sleep "$every"
  fi
done
kubectl logs -n "$namespace" "${pods[@]}" --tail=-1 || echo "wait: the first pod of $object gave no log" >&2
if [ "$status" -eq 0 ]; then
  echo "$object: it passed"
else
  echo "$object: it failed; all logs: deploy/k8s/collect-logs.sh OUT --namespace $namespace" >&2
fi
exit "$status"
