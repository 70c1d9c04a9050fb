"""deploy/k8s: every overlay is rendered, and what comes out is valid, fits together, and differs where it should."""

import functools
import pathlib
import shutil
import tempfile
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
        wanted = {"gke-a4", "gke-a4-cos", "gke-a4-privileged", "unprivileged", "hostnetwork", "privileged", "ngc", "distroless", "dra", "uninstall"}
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
                self.assertEqual(security.get("privileged", False), overlay.name in ("privileged", "gke-a4-privileged", "gke-a4-cos"))
                network = job_pod(overlay.name)["spec"].get("hostNetwork", False)
                self.assertEqual(network, overlay.name in ("hostnetwork", "gke-a4-cos"))

    def test_every_pod_may_open_the_nics(self):
        """A mounted /dev/infiniband shows devices that the container may not open: GKE's interfaces, a device plugin or
        privileges give that right."""
        for overlay in OVERLAYS:
            with self.subTest(overlay.name):
                template = job_pod(overlay.name)
                [container] = template["spec"]["containers"]
                limits = container["resources"].get("limits", {})
                given = [
                    "networking.gke.io/interfaces" in template["metadata"].get("annotations", {}),
                    any(name.startswith("rdma/") for name in limits),
                    container["securityContext"].get("privileged", False),
                ]
                self.assertTrue(any(given) or overlay.name == "uninstall", "nothing lets it open the NICs")
                mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
                self.assertNotEqual("/dev/infiniband" in mounts, given[1], "a device plugin brings the devices by itself")

    def test_the_images_rdma_core_comes_before_the_nodes(self):
        for key in (("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode")):
            [(_, spec)] = lint.templates(rendered("gke-a4")[key])
            path = lint.variable(spec["containers"][0], "LD_LIBRARY_PATH").split(":")
            self.assertLess(path.index("/usr/lib/x86_64-linux-gnu"), path.index("/usr/local/nvidia/lib64"), key)

    def test_unprivileged_touches_no_folder_of_the_node(self):
        for key, document in rendered("unprivileged").items():
            if document["kind"] in ("Job", "Pod", "DaemonSet"):
                volumes = [volume for _, spec in lint.templates(document) for volume in spec["volumes"]]
                self.assertFalse([volume for volume in volumes if "hostPath" in volume], key)
        self.assertNotIn(("DaemonSet", "deep-ep-installer"), rendered("unprivileged"))

    def test_unprivileged_asks_for_nothing_that_does_not_reach_it(self):
        for key in (("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode")):
            [(_, spec)] = lint.templates(rendered("unprivileged")[key])
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertEqual(spec["containers"][0]["securityContext"]["capabilities"], {"drop": ["ALL"]})

    def test_a4_means_b200(self):
        for overlay in ("gke-a4", "gke-a4-cos", "gke-a4-privileged"):
            for key in (("DaemonSet", "deep-ep-installer"), ("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode")):
                [(_, spec)] = lint.templates(rendered(overlay)[key])
                self.assertEqual(spec["nodeSelector"]["cloud.google.com/gke-accelerator"], lint.A4_GPU, (overlay, key))

    def test_uninstall_gets_everywhere(self):
        spec = rendered("uninstall")["DaemonSet", "deep-ep-installer"]["spec"]["template"]["spec"]
        self.assertNotIn("nodeSelector", spec)
        self.assertEqual([v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v], ["/home/kubernetes/bin/deep_ep"])

    def test_gke_a4_goes_with_one_more_component(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(DEPLOY / "k8s", pathlib.Path(folder) / "k8s")
            mine = pathlib.Path(folder) / "k8s/overlays/gke-a4-privileged/kustomization.yaml"
            text = mine.read_text()
            for component in ("privileged", "ngc", "distroless", "dra"):
                with self.subTest(component):
                    mine.write_text(text.replace("components/privileged", f"components/{component}"))
                    objects = kustomize.render(mine.parent)
                    self.assertEqual([p for d in objects for p in strict.problems_of(d)] + list(lint.problems_of(objects, variables())), [])
                    [spec] = [s for d in objects if d["metadata"]["name"] == "deep-ep-internode" for _, s in lint.templates(d)]
                    self.assertIn("driver", {volume["name"] for volume in spec["volumes"]})

    def test_the_doctor_sees_labels_and_annotations(self):
        for key in (("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode")):
            [(_, spec)] = lint.templates(rendered("gke-a4")[key])
            [volume] = [volume for volume in spec["volumes"] if "downwardAPI" in volume]
            self.assertEqual([item["path"] for item in volume["downwardAPI"]["items"]], ["annotations", "labels"])
            self.assertIn((volume["name"], "/etc/podinfo"), {(m["name"], m["mountPath"]) for m in spec["containers"][0]["volumeMounts"]})

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
        self.assertNotIn("nvidia.com/gpu", job_pod("dra")["spec"]["containers"][0]["resources"]["limits"])


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
