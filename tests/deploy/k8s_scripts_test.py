"""The scripts beside the manifests, with a stand-in for kubectl."""

import pathlib
import shutil
import tempfile
import unittest

from support import DEPLOY, environment, main, run, stand_in

import kustomize

DIGEST = "sha256:" + "a1" * 32
KUBECTL = r"""
echo "$*" >>"$CALLS"
case "$*" in
  "get pods"*jsonpath*) printf 'deep-ep-internode-0-aaaaa 0\ndeep-ep-internode-1-bbbbb 1\ndeep-ep-intranode \n' ;;
  "get pods"*) echo 'NAME READY' ;;
  "logs "*"-0-aaaaa "*) printf 'hello\n=== begin connectivity-test.log\n2 nodes\n=== end connectivity-test.log\n=== begin nccl-test-results.txt\n# nccl\n8 2\n=== end nccl-test-results.txt\nbye\n' ;;
  "logs "*"$BROKEN"*) exit 1 ;;
  "logs "*) echo "log of $4" ;;
esac
"""


class Scripts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)
        stand_in(self.top / "bin", "kubectl", KUBECTL)
        shutil.copytree(DEPLOY / "k8s", self.top / "k8s")
        self.calls = self.top / "calls"

    def start(self, script, *arguments, **extra):
        extra = {"CALLS": str(self.calls), "BROKEN": "none", **extra}
        return run([self.top / "k8s" / script, *arguments], env=environment(self.top / "bin", **extra))

    def images(self):
        [component] = kustomize.documents(self.top / "k8s/image/kustomization.yaml")
        return {image["name"]: f"{image['newName']}@{image.get('digest')}" for image in component["images"]}

    def test_set_image(self):
        before = self.images()
        status, text, errors = self.start("set-image.sh", "eu.pkg.dev/p/r/deep_ep@" + DIGEST)
        self.assertEqual((status, errors), (0, ""))
        self.assertEqual(self.images(), {**before, "deep-ep": "eu.pkg.dev/p/r/deep_ep@" + DIGEST})
        self.assertEqual(self.start("set-image.sh", "--ngc", "localhost:5000/ngc@" + DIGEST)[0], 0)
        self.assertEqual(self.images()["deep-ep-ngc"], "localhost:5000/ngc@" + DIGEST)
        [job] = [d for d in kustomize.render(self.top / "k8s/overlays/gke-a4") if d["kind"] == "Job" and "internode" in d["metadata"]["name"]]
        self.assertEqual(job["spec"]["template"]["spec"]["containers"][0]["image"], "eu.pkg.dev/p/r/deep_ep@" + DIGEST)

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

    def test_collect_logs_elsewhere(self):
        self.start("collect-logs.sh", self.top / "out", "--namespace", "other", "--selector", "a=b")
        self.assertIn("get pods -n other -l a=b", self.calls.read_text())

    def test_collect_logs_of_a_pod_without(self):
        status, _, errors = self.start("collect-logs.sh", self.top / "out", BROKEN="-1-bbbbb")
        self.assertEqual((status, errors), (1, "collect-logs: pod deep-ep-internode-1-bbbbb gave no log\n"))
        self.assertTrue((self.top / "out/pod-logs/deep-ep-intranode.log").exists())

    def test_collect_logs_wrong(self):
        for words in ([], ["a", "b"], ["--selector"], ["--what", "x"]):
            with self.subTest(words):
                self.assertEqual(self.start("collect-logs.sh", *words)[0], 2)

    def test_uninstall(self):
        self.assertEqual(self.start("uninstall.sh")[0], 0)
        calls = self.calls.read_text().splitlines()
        self.assertEqual([call.split()[0] for call in calls], ["delete", "apply", "rollout", "delete"])
        self.assertEqual(self.start("uninstall.sh", "now")[0], 2)


main()
