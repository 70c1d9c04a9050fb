"""docs/gke.md and docs/testbed.md: their commands are run, as they stand, against a stand-in for a cluster; what they name
is there."""

import json
import pathlib
import re
import shutil
import sys
import tempfile
import unittest

from support import DEPLOY, ROOT, environment, main, run, stand_in, tool, variables

import charts
import kustomize

GUIDES = {name: (ROOT / "docs" / name).read_text() for name in ("gke.md", "testbed.md")}


# Nothing is there before it is made.
GCLOUD = r"""
echo "$*" >>"$CLUSTER.gcloud"
case "$*" in
  "artifacts docker images describe "*) echo "${5%:*}@sha256:$(printf 'ab%.0s' {1..32})" ;;
  *" describe "*) exit 1 ;;
esac
"""


def blocks(guide):
    return re.findall(r"^```sh\n(.*?)^```", GUIDES[guide], re.M | re.S)


def edited(text):
    """The example of the settings as a user changes it."""
    return text.replace("my-project", "our-project").replace("0" * 64, "12" * 32)


def commands(text):
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


class Run(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.top = pathlib.Path(folder.name)
        shutil.copytree(DEPLOY, self.top / "deploy")
        stub = pathlib.Path(__file__).parent / "stub_cluster.py"
        stand_in(self.top / "bin", "gcloud", GCLOUD)
        stand_in(self.top / "bin", "git", "echo 0123456789\n")
        for name in ("kubectl", "helm"):
            stand_in(self.top / "bin", name, f'exec {sys.executable} -B {stub} {name} "$@"\n')

    def start(self, script, **extra):
        settings = {**extra, "CLUSTER": str(self.top / "cluster.json"), "DEPLOY_TESTS": str(pathlib.Path(__file__).parent), "USER": "me"}
        return run(["bash", "-c", "set -euo pipefail\n" + script], cwd=self.top, env=environment(self.top / "bin", **settings), timeout=280)

    def state(self):
        return json.loads((self.top / "cluster.json").read_text())

    def test_gke(self):
        parts = blocks("gke.md")
        copied, read_in = parts[0].split("\n", 1)
        self.assertEqual(self.start(copied)[0], 0)
        settings = self.top / "deploy/gke/.env"
        settings.write_text(edited(settings.read_text()))
        status, text, errors = self.start(read_in + "".join(parts[1:5]))
        self.assertEqual((status, errors), (0, ""), text)
        # Again: it runs again, and what comes out is of the second run.
        status, text, errors = self.start(parts[4], RUN="Failed")
        self.assertEqual(status, 1, text)
        self.assertIn("job/deep-ep-internode: it failed", errors)
        status, _, errors = self.start(parts[4])
        self.assertEqual((status, errors), (0, ""))
        self.assertIn("Every checked result is exact", text)
        objects = self.state()["objects"]
        pod = objects["Job/deep-ep-internode"]["spec"]["template"]["spec"]
        self.assertEqual(
            pod["containers"][0]["image"], "asia-southeast1-docker.pkg.dev/our-project/images/deep-ep@sha256:" + "ab" * 32
        )
        # The pods' interfaces are on networks that were made.
        annotations = objects["Job/deep-ep-internode"]["spec"]["template"]["metadata"]["annotations"]
        for interface in json.loads(annotations["networking.gke.io/interfaces"]):
            if interface["network"] != "default":
                self.assertIn(f"Network/{interface['network']}", objects)
        created = [line for line in (self.top / "cluster.json.gcloud").read_text().splitlines() if " create " in line]
        self.assertEqual(len(created), 3 + 1 + 8 + 1)
        # The image knows its commit, although the sources are sent without .git.
        self.assertIn(",_COMMIT=0123456789", (self.top / "cluster.json.gcloud").read_text())
        # The rest, with the settings read in again as in the same shell.
        status, text, errors = self.start("set -a; . deploy/gke/.env; set +a\n" + "".join(parts[5:]))
        self.assertEqual((status, errors), (0, ""), text)
        left = {key.split("/")[0] for key in self.state()["objects"]}
        self.assertEqual(left, {"Network", "GKENetworkParamSet"})

    def test_the_count_that_gke_md_states(self):
        parts = blocks("gke.md")[:5]
        counted = [len(commands(part)) for part in parts]
        stated = [int(number) for number in re.findall(r"^\| \d [^|]* \| (\d+) \|", GUIDES["gke.md"], re.M)]
        self.assertEqual(stated, counted)
        self.assertIn(f"in {sum(counted)} commands", GUIDES["gke.md"])

    def test_testbed(self):
        if charts.mini_helm() is None:
            self.skipTest("there is no Go with sprig to render the chart: scripts/setup --deploy installs it")
        (self.top / "deploy/gke/.env").write_text(edited((DEPLOY / "gke/env.example").read_text()))
        status, text, errors = self.start("".join(blocks("testbed.md")))
        self.assertEqual((status, errors), (0, ""), text)
        self.assertTrue((self.top / "testbed-logs/pod-logs/coordinator.log").exists())
        self.assertEqual(self.state()["releases"], {})
        status, _, errors = self.start("".join(blocks("testbed.md")), RUN="Failed")
        self.assertEqual(status, 1)
        self.assertIn("jobset/me-testbed: it failed", errors)

    def test_the_stand_in_refuses(self):
        """It would notice a guide that is wrong."""
        for wrong, words in (
            ("kubectl apply -k deploy/k8s/overlays/gke-b4", "No such file"),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4 -l app.kubernetes.io/component=nothing", "no objects passed"),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4 -l app.kubernetes.io/component=internode", 'namespaces "deep-ep" not found'),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4; kubectl wait --for=condition=complete job/deepep-job -n deep-ep", "not found"),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4; kubectl wait --for=condition=done job/deep-ep-internode -n deep-ep", "never has"),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4; kubectl logs job/deep-ep-internode", "is in namespace deep-ep"),
            ("kubectl apply --what x", "unknown flag"),
            (
                "kubectl apply -k deploy/k8s/overlays/gke-a4; kubectl apply -k deploy/k8s/overlays/gke-a4-privileged",
                "Job/deep-ep-internode is invalid: spec.template: field is immutable",
            ),
            ("kubectl apply -k deploy/k8s/overlays/gke-a4; RUN=Failed deploy/k8s/wait.sh job/internode --every 1", "not found"),
            ("helm install t deploy/helm/deep-ep-testbed --set workload.gpus=12", "multiple of 8"),
            ("helm uninstall t", "not found"),
        ):
            with self.subTest(wrong):
                (self.top / "cluster.json").unlink(missing_ok=True)
                status, _, errors = self.start(wrong)
                self.assertNotEqual(status, 0)
                self.assertIn(words, errors)


class Names(unittest.TestCase):
    def test_files(self):
        for guide, text in GUIDES.items():
            for name in set(re.findall(r"\b(?:deploy|scripts|image|docs)/[\w./-]*\w", text)):
                if not name.endswith("/.env"):
                    self.assertTrue((ROOT / name).exists(), f"{guide}: {name}")

    def test_values_of_the_chart(self):
        values = charts.values()
        for name in set(re.findall(r"`([a-z][A-Za-z.]*)`", GUIDES["testbed.md"].split("## Values")[1].split("## When")[0])) | set(
            re.findall(r"--set(?:-file)? \"?([a-zA-Z.]+)=", GUIDES["testbed.md"])
        ):
            if name in ("job", "jobset", "host", "pod", "none", "claim", "bucket", "interfaces", "preferred", "mpirun"):
                continue
            place = values
            for part in name.split("."):
                if part == "NCCL_DEBUG" or (isinstance(place, dict) and not place and name.startswith("workload.env.")):
                    break
                self.assertIn(part, place, name)
                place = place[part]

    def test_pods_and_objects(self):
        objects = {d["metadata"]["name"] for d in kustomize.render(DEPLOY / "k8s/overlays/gke-a4")}
        for name in re.findall(r"\bdeep-ep-[a-z-]+", GUIDES["gke.md"]):
            stem = re.sub(r"-(\d+-)?x*$", "", name).rstrip("-")
            self.assertTrue(stem in objects or stem in ("deep-ep-testbed",), name)

    def test_components_and_overlays(self):
        rendered = kustomize.render(DEPLOY / "k8s/overlays/dra")
        components = {d["metadata"]["labels"]["app.kubernetes.io/component"] for d in rendered}
        for guide in GUIDES.values():
            for name in re.findall(r"app\.kubernetes\.io/component=([a-z-]+)", guide):
                self.assertIn(name, components)
        table = set(re.findall(r"^\| `([a-z0-9-]+)` \|", GUIDES["gke.md"].split("## Overlays")[1], re.M))
        self.assertEqual(table, {path.name for path in (DEPLOY / "k8s/overlays").iterdir()})

    def test_variables(self):
        if variables() is None:
            self.skipTest("DEEP_EP_TOOL does not name the built deep_ep")
        for guide in GUIDES.values():
            for name in re.findall(r"\bDEEP_EP_[A-Z_]+", guide):
                self.assertIn(name, variables())

    def test_commands_and_flags_of_deep_ep(self):
        """In the guides, the manifests and the scripts of the chart."""
        program = tool()
        texts = list(GUIDES.values())
        for document in kustomize.render(DEPLOY / "k8s/overlays/gke-a4"):
            for found in re.findall(r'"command": (\[[^\]]*\])', json.dumps(document)):
                words = json.loads(found)
                if words[0].endswith("bin/deep_ep"):
                    texts.append("deep_ep " + " ".join(words[1:]).replace("/opt/deep_ep/bin/deep_ep", "\ndeep_ep"))
        for path in [*(charts.CHART / "scripts").iterdir(), *(DEPLOY / "slurm").iterdir()]:
            texts.append(re.sub(r'"\$\{?(?:deep_ep|TESTBED_DEEP_EP)[^"]*"', "\ndeep_ep", path.read_text().replace("\\\n", " ")))
        seen = set()
        for text in texts:
            for line in re.findall(r"\bdeep_ep ((?:doctor|bench|launch|env|size)\b[^\n`|]*)", text):
                words = line.split(" -- ")[0].split()
                command = [words[0]]
                if words[0] == "bench" and len(words) > 1:
                    command.append(words[1])
                seen.add((tuple(command), tuple(re.findall(r"(?<!\S)(--[a-z][a-z-]*)", " ".join(words)))))
        self.assertIn((("bench", "internode"), ("--nodes", "--check")), seen)
        for command, flags in seen:
            status, text, _ = run([program, *command, "--help"])
            self.assertEqual(status, 0, command)
            self.assertIn("Usage: deep_ep " + " ".join(command), text)
            for flag in flags:
                self.assertRegex(text, rf"(?m)^\s+(-\w,)?{flag}\b", f"{command} {flag}")


main()
