#!/usr/bin/env bats
# The scripts of deploy/k8s with a kubectl that answers from a file: every end that a run can have.
load stubs

# cluster STATE...: what the object is at each look, the last for ever
cluster() {
  stub sleep <<<'exec /bin/sleep 0.02'
  printf '%s\n' "$@" >"$STATE"
  stub kubectl <<'END'
case "$*" in
  "get job/"* | "get jobset/"* | "get pod/"*)
    state=$(head -n 1 "$STATE")
    [ "$(wc -l <"$STATE")" -le 1 ] || sed -i 1d "$STATE"
    [ "$state" != unreachable ] || exit 1
    echo "$state"
    ;;
  "logs "*) echo "the first pod's log" ;;
  "get pods "*jsonpath*) printf 'run-0-abcde 0\nrun-1-fghij 1\n' ;;
  "get nodes "*) echo "Error from server (Forbidden)" >&2; exit 1 ;;
  get*) echo NAME ;;
esac
END
}

@test "wait: a run that passes" {
  cluster Running Suspended Complete
  run "$root/deploy/k8s/wait.sh" job/deep-ep-internode --every 1
  [ "$status" -eq 0 ]
  has "the first pod's log"
  has "job/deep-ep-internode: it passed"
  called "kubectl logs -n deep-ep -l batch.kubernetes.io/job-name=deep-ep-internode,batch.kubernetes.io/job-completion-index=0"
}

@test "wait: a run that fails ends with 1, and its log is shown" {
  cluster Failed
  run "$root/deploy/k8s/wait.sh" jobset/testbed --namespace other
  [ "$status" -eq 1 ]
  has "the first pod's log"
  has "jobset/testbed: it failed"
  called "get jobset/testbed -n other"
}

@test "wait: a cluster that is out of reach for a moment is asked again" {
  cluster unreachable unreachable Succeeded
  run "$root/deploy/k8s/wait.sh" pod/deep-ep-intranode --every 1
  [ "$status" -eq 0 ]
}

@test "wait: one that stays out of reach is not waited for" {
  cluster unreachable
  run "$root/deploy/k8s/wait.sh" job/x --every 1
  [ "$status" -eq 1 ]
  has "cannot be looked at"
}

@test "wait: without an end it gives up" {
  cluster Running
  run "$root/deploy/k8s/wait.sh" job/x --every 1 --timeout 1
  [ "$status" -eq 1 ]
  has "has not ended after 1 s"
}

@test "wait: wrong arguments" {
  for words in "" "deployment/x" "job/x --timeout soon" "job/x job/y" "job/x --what"; do
    # shellcheck disable=SC2086
    run "$root/deploy/k8s/wait.sh" $words
    [ "$status" -eq 2 ]
    has "allowed: "
  done
}

@test "collect-logs: the rest is there where one question is refused" {
  cluster Complete
  run "$root/deploy/k8s/collect-logs.sh" "$work/out"
  [ "$status" -eq 1 ]
  has "kubectl get nodes failed, so nodes.txt is not whole"
  [ "$(cat "$work/out/pod-logs/coordinator.log")" = "the first pod's log" ]
  [ -s "$work/out/pod-logs/worker-1.log" ]
}

@test "set-image: refuses what is no digest, and changes nothing" {
  cp -r "$root/deploy/k8s" "$work/k8s"
  run "$work/k8s/set-image.sh" registry/deep_ep:latest
  [ "$status" -eq 2 ]
  diff -r "$root/deploy/k8s" "$work/k8s"
}
