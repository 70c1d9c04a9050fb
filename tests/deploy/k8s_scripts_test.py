"""The scripts beside the manifests, with a stand-in for kubectl."""

import shutil

import rules
from support import DEPLOY, InFolder, documents, environment, main, render, run, stand_in

DIGEST = "sha256:" + "a1" * 32
KUBECTL = r"""
echo "$*" >>"$CALLS"
case "$*" in
  "get "*"/run "*) # the next of the states, a line each; the last stays
    read -r state more <"$STATES"
    [ -z "$more" ] || echo "$more" >"$STATES"
    [ "$state" != gone ] || exit 1
    echo "$state"
    ;;
  "get pods"*jsonpath*) printf 'deep-ep-internode-0-aaaaa 0\ndeep-ep-internode-1-bbbbb 1\ndeep-ep-intranode \n' ;;
  "get pods"*) echo 'NAME READY' ;;
  "logs "*"-0-aaaaa "*) printf 'hello\n=== begin connectivity-test.log\n2 nodes\n=== end connectivity-test.log\n=== begin nccl-test-results.txt\n# nccl\n8 2\n=== end nccl-test-results.txt\nbye\n' ;;
  "logs "*) echo "log of $4" ;;
esac
"""


class Scripts(InFolder):
    def setUp(self):
        super().setUp()
        stand_in(self.top / "bin", "kubectl", KUBECTL)
        stand_in(self.top / "bin", "sleep", "exec /bin/sleep 0.02\n")
        shutil.copytree(DEPLOY / "k8s", self.top / "k8s")
        self.calls = self.top / "calls"

    def start(self, script, *arguments, **extra):
        return run([self.top / "k8s" / script, *arguments], env=environment(self.top / "bin", CALLS=str(self.calls), **extra))

    def images(self):
        [component] = documents(self.top / "k8s/image/kustomization.yaml")
        return {image["name"]: f"{image['newName']}@{image.get('digest')}" for image in component["images"]}

    def test_set_image_wants_a_digest(self):
        before = self.images()
        for words in (["r/deep_ep:latest"], ["r/deep_ep"], ["r/deep_ep@sha256:12"], [], ["a@" + DIGEST, "b"]):
            with self.subTest(words):
                status, _, errors = self.start("set-image.sh", *words)
                self.assertEqual(status, 2)
                self.assertRegex(errors, r"^set-image: .*allowed: .*\n$")
        self.assertEqual(self.images(), before)

    def test_collect_logs(self):
        for _ in range(2):  # again into the same folder
            status, text, errors = self.start("collect-logs.sh", self.top / "out")
            self.assertEqual((status, errors), (0, ""))
        out = self.top / "out"
        self.assertEqual(
            sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()),
            ["connectivity-test.log", "events.txt", "nccl-test-results.txt", "nodes.txt", "pod-logs/coordinator.log",
             "pod-logs/deep-ep-intranode.log", "pod-logs/worker-1.log", "pods.txt"],
        )
        self.assertEqual((out / "nccl-test-results.txt").read_text(), "# nccl\n8 2\n")
        self.assertEqual((out / "connectivity-test.log").read_text(), "2 nodes\n")
        self.assertIn("-n deep-ep", self.calls.read_text())

    def test_set_image_of_kubectl(self):
        before = self.images()
        for image in ("eu.pkg.dev/p/r/kubectl:v1.33.5", "eu.pkg.dev/p/r/kubectl@" + DIGEST, "localhost:5000/kubectl:v1.33.5"):
            with self.subTest(image):
                status, _, errors = self.start("set-image.sh", "--kubectl", image)
                self.assertEqual((status, errors), (0, ""))
                objects = render(self.top / "k8s/overlays/gke-a4")
                pods = [spec for d in objects for _, spec in rules.pods(d)]
                images = {c["image"] for spec in pods for c in spec["containers"] + spec.get("initContainers", []) if c["command"][0] == "kubectl"}
                self.assertEqual(images, {image})
        self.assertEqual({**self.images(), "kubectl": ""}, {**before, "kubectl": ""})
        for wrong in ("r/kubectl", "r/kubectl:latest"):
            self.assertEqual(self.start("set-image.sh", "--kubectl", wrong)[0], 2)

    def wait(self, states, *words, **extra):
        (self.top / "states").write_text(states + "\n")
        self.calls.write_text("")
        return self.start("wait.sh", *words, "--every", "1", STATES=str(self.top / "states"), **extra)

    def test_wait(self):
        for words, states, wanted in (
            (["job/run"], "Suspended Complete", 0),
            (["job/run"], "Failed", 1),
            (["job/run"], "Suspended gone gone Complete", 0),
            (["jobset/run"], "Completed", 0),
            (["jobset/run"], "Failed", 1),
            (["pod/run"], "Running Succeeded", 0),
            (["pod/run"], "Failed", 1),
        ):
            with self.subTest(words=words, states=states):
                status, text, errors = self.wait(states, *words, "--namespace", "n")
                self.assertEqual(status, wanted, errors)
                self.assertIn(f"{words[0]}: it {'failed' if wanted else 'passed'}", text + errors)
                log = self.calls.read_text().splitlines()[-1]
                kind = words[0].split("/")[0]
                pods = {"job": "-l batch.kubernetes.io/job-name=run,", "jobset": "-l jobset.sigs.k8s.io/jobset-name=run,", "pod": "run "}[kind]
                self.assertTrue(log.startswith("logs -n n " + pods), log)
                self.assertIn("--tail=-1", log)
                self.assertEqual("batch.kubernetes.io/job-completion-index=0" in log, kind != "pod")

    def test_wait_for_ever(self):
        status, _, errors = self.wait("Running", "pod/run", "--timeout", "1")
        self.assertEqual(status, 1)
        self.assertIn("wait: pod/run in namespace deep-ep has not ended after 1 s\n", errors)

    def uninstall(self, *words):
        self.calls.write_text("")
        status, text, errors = self.start("uninstall.sh", *words)
        calls = [call.replace(str(self.top / "k8s/"), "") for call in self.calls.read_text().splitlines()]
        return status, text + errors, calls

    def test_uninstall(self):
        self.start("set-image.sh", "eu.pkg.dev/p/r/deep_ep@" + DIGEST)
        calls = [
            "delete -k /overlays/uninstall -l app.kubernetes.io/component in (intranode,internode) --ignore-not-found",
            "apply -k /overlays/uninstall -l app.kubernetes.io/component=installer",
            "rollout status daemonset/deep-ep-installer -n deep-ep --timeout 300s",
            "delete -k /overlays/uninstall --ignore-not-found",
        ]
        self.assertEqual(self.uninstall(), (0, "", calls))


main()
