"""deploy/k8s: every overlay is rendered, and what comes out is valid, fits together, and differs where it should."""

import functools
import shutil
import unittest

from support import DEPLOY, main, run, variables

import kustomize
import lint
import strict
import yaml

OVERLAYS = sorted(path for path in (DEPLOY / "k8s/overlays").iterdir())
A_PLACEHOLDER = "sha256:" + "0" * 64


@functools.cache
def rendered(name):
    return {(d["kind"], d["metadata"]["name"]): d for d in kustomize.render(DEPLOY / "k8s/overlays" / name)}


def job_pod(name):
    return rendered(name)["Job", "deep-ep-internode"]["spec"]["template"]


class Manifests(unittest.TestCase):
    def test_all_overlays_are_there(self):
        wanted = {"gke-a4", "gke-a4-cos", "unprivileged", "hostnetwork", "privileged", "ngc", "distroless", "dra", "uninstall"}
        self.assertEqual({path.name for path in OVERLAYS}, wanted)

    def test_valid_and_fitting(self):
        for overlay in [DEPLOY / "k8s/base", *OVERLAYS]:
            with self.subTest(overlay.name):
                objects = list(rendered(overlay.name).values()) if overlay.name != "base" else kustomize.render(overlay)
                found = [problem for document in objects for problem in strict.problems_of(document)]
                if overlay.name != "base":
                    found += lint.problems_of(objects, variables())
                self.assertEqual(found, [])

    def test_as_kubectl_renders_them(self):
        if shutil.which("kubectl") is None:
            self.skipTest("there is no kubectl to compare with")
        for overlay in OVERLAYS:
            with self.subTest(overlay.name):
                status, text, errors = run(["kubectl", "kustomize", overlay])
                self.assertEqual((status, errors), (0, ""))
                theirs = {(d["kind"], d["metadata"]["name"]): d for d in kustomize.load_all(text)}
                self.assertEqual(rendered(overlay.name), theirs)

    def test_every_object_can_be_applied_by_its_component(self):
        components = {"installer", "intranode", "internode", "collect-logs", "gpus"}
        for overlay in OVERLAYS:
            for key, document in rendered(overlay.name).items():
                with self.subTest(overlay=overlay.name, object=key):
                    labels = document["metadata"]["labels"]
                    self.assertIn(labels["app.kubernetes.io/component"], components)
                    self.assertEqual(labels["app.kubernetes.io/name"], "deep-ep")


class Overlays(unittest.TestCase):
    def test_only_some_are_privileged(self):
        for overlay in OVERLAYS:
            with self.subTest(overlay.name):
                security = job_pod(overlay.name)["spec"]["containers"][0]["securityContext"]
                self.assertEqual(security.get("privileged", False), overlay.name in ("privileged", "gke-a4-cos"))
                network = job_pod(overlay.name)["spec"].get("hostNetwork", False)
                self.assertEqual(network, overlay.name in ("hostnetwork", "gke-a4-cos"))

    def test_unprivileged_touches_no_folder_of_the_node(self):
        for key, document in rendered("unprivileged").items():
            if document["kind"] in ("Job", "Pod"):
                volumes = [volume for _, spec in lint.templates(document) for volume in spec["volumes"]]
                self.assertFalse([volume for volume in volumes if "hostPath" in volume], key)

    def test_the_driver_of_gke_is_mounted_for_reading(self):
        mounts = {m["mountPath"]: m for m in job_pod("gke-a4")["spec"]["containers"][0]["volumeMounts"]}
        self.assertTrue(mounts["/usr/local/nvidia"]["readOnly"])

    def test_interfaces_are_those_of_the_networks(self):
        interfaces = yaml.safe_load(job_pod("gke-a4")["metadata"]["annotations"]["networking.gke.io/interfaces"])
        self.assertEqual([i["network"] for i in interfaces], ["default", "gvnic-1"] + [f"rdma-{i}" for i in range(8)])
        self.assertEqual([i["interfaceName"] for i in interfaces], [f"eth{i}" for i in range(10)])
        self.assertNotIn("annotations", job_pod("gke-a4-cos")["metadata"])

    def test_images(self):
        def image(overlay):
            return job_pod(overlay)["spec"]["containers"][0]["image"]

        self.assertEqual(image("gke-a4"), "registry.invalid/deep-ep@" + A_PLACEHOLDER)
        self.assertEqual(image("ngc"), "registry.invalid/deep-ep-ngc@" + A_PLACEHOLDER)
        self.assertEqual(image("distroless"), "registry.invalid/deep-ep-distroless@" + A_PLACEHOLDER)

    def test_distroless_has_no_installer(self):
        self.assertNotIn(("DaemonSet", "deep-ep-installer"), rendered("distroless"))

    def test_dra_asks_for_eight(self):
        claim = rendered("dra")["ResourceClaimTemplate", "deep-ep-gpus"]
        self.assertEqual(claim["spec"]["spec"]["devices"]["requests"][0]["exactly"]["count"], 8)
        self.assertNotIn("limits", job_pod("dra")["spec"]["containers"][0]["resources"])


class Base(unittest.TestCase):
    def test_readiness_is_the_doctor(self):
        for overlay, more in (("hostnetwork", []), ("gke-a4", ["--gpus", "8", "--nics", "8"])):
            spec = rendered(overlay)["DaemonSet", "deep-ep-installer"]["spec"]["template"]["spec"]
            probe = spec["containers"][0]["readinessProbe"]["exec"]["command"]
            self.assertEqual(probe, ["/host/deep_ep/current/bin/deep_ep", "doctor", "--quick", *more])
            # The annotation says the same.
            self.assertEqual(lint.variable(spec["initContainers"][0], "EXPECT") or "", " ".join(more))

    def test_pods_end_with_the_status_of_the_run(self):
        for key in (("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode")):
            [(_, spec)] = lint.templates(rendered("gke-a4")[key])
            [container] = spec["containers"]
            # The program itself, without a shell around it that could lose its status.
            self.assertEqual(container["command"][0], "/opt/deep_ep/bin/deep_ep")
            self.assertIn("--check", container["command"])


main()
