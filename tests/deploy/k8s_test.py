"""deploy/k8s: every overlay is rendered by kubectl, and what comes out is valid, fits together, and differs where it should."""

import functools
import json
import pathlib
import shutil
import tempfile
import unittest

import rules
from support import DEPLOY, documents, main, needs, render

OVERLAYS = sorted(path.name for path in (DEPLOY / "k8s/overlays").iterdir())
PODS = (("Pod", "deep-ep-intranode"), ("Job", "deep-ep-internode"))


@functools.cache
def rendered(name):
    return {(d["kind"], d["metadata"]["name"]): d for d in render(DEPLOY / "k8s/overlays" / name)}


def pod(name, key=PODS[1]):
    [(metadata, spec)] = rules.pods(rendered(name)[key])
    return metadata, spec


class Overlays(unittest.TestCase):
    def setUp(self):
        needs("kubectl")

    def test_valid_and_fitting(self):
        components = {"installer", "intranode", "internode", "gpus"}
        self.assertEqual(len(OVERLAYS), 10)
        for overlay in OVERLAYS:
            with self.subTest(overlay):
                objects = rendered(overlay).values()
                rules.check(self, objects)
                for document in objects:  # what is applied by its component
                    labels = document["metadata"]["labels"]
                    self.assertIn(labels["app.kubernetes.io/component"], components)
                    self.assertEqual(labels["app.kubernetes.io/name"], "deep-ep")

    def test_privileges(self):
        for overlay in OVERLAYS:
            with self.subTest(overlay):
                _, spec = pod(overlay)
                security = spec["containers"][0]["securityContext"]
                self.assertEqual(security.get("privileged", False), overlay in ("privileged", "gke-a4-privileged", "gke-a4-cos"))
                self.assertEqual(spec.get("hostNetwork", False), overlay in ("hostnetwork", "gke-a4-cos"))

    def test_every_pod_may_open_the_nics(self):
        """A mounted /dev/infiniband shows devices that the container may not open: GKE's interfaces, a device plugin or
        privileges give that right."""
        for overlay in OVERLAYS:
            with self.subTest(overlay):
                metadata, spec = pod(overlay)
                [container] = spec["containers"]
                given = [
                    "networking.gke.io/interfaces" in metadata.get("annotations", {}),
                    any(name.startswith("rdma/") for name in container["resources"].get("limits", {})),
                    container["securityContext"].get("privileged", False),
                ]
                self.assertTrue(any(given) or overlay == "uninstall", "nothing lets it open the NICs")
                mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
                self.assertNotEqual("/dev/infiniband" in mounts, given[1], "a device plugin brings the devices by itself")

    def test_the_images_rdma_core_comes_before_the_nodes(self):
        for key in PODS:
            path = rules.variable(pod("gke-a4", key)[1]["containers"][0], "LD_LIBRARY_PATH").split(":")
            self.assertLess(path.index("/usr/lib/x86_64-linux-gnu"), path.index("/usr/local/nvidia/lib64"), key)

    def test_unprivileged(self):
        self.assertNotIn(("DaemonSet", "deep-ep-installer"), rendered("unprivileged"))
        for key in PODS:
            _, spec = pod("unprivileged", key)
            self.assertTrue(spec["securityContext"]["runAsNonRoot"])
            self.assertEqual(spec["containers"][0]["securityContext"]["capabilities"], {"drop": ["ALL"]})
            self.assertFalse([volume for volume in spec["volumes"] if "hostPath" in volume], key)

    def test_a4(self):
        for overlay in ("gke-a4", "gke-a4-cos", "gke-a4-privileged"):
            for key in (("DaemonSet", "deep-ep-installer"), *PODS):
                selector = pod(overlay, key)[1]["nodeSelector"]
                self.assertEqual(selector["cloud.google.com/gke-accelerator"], rules.A4_GPU, (overlay, key))
        metadata, spec = pod("gke-a4")
        mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
        self.assertTrue(mounts["/usr/local/nvidia"]["readOnly"])
        interfaces = json.loads(metadata["annotations"]["networking.gke.io/interfaces"])
        self.assertEqual([i["network"] for i in interfaces], ["default", "gvnic-1"] + [f"rdma-{i}" for i in range(8)])
        self.assertEqual([i["interfaceName"] for i in interfaces], [f"eth{i}" for i in range(10)])
        self.assertNotIn("annotations", pod("gke-a4-cos")[0])

    def test_gke_a4_goes_with_one_more_component(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(DEPLOY / "k8s", pathlib.Path(folder) / "k8s")
            text = (DEPLOY / "k8s/overlays/gke-a4-privileged/kustomization.yaml").read_text()
            for component in ("privileged", "ngc", "distroless", "dra"):
                with self.subTest(component):
                    mine = pathlib.Path(folder) / "k8s/overlays" / f"mine-{component}"
                    mine.mkdir()
                    (mine / "kustomization.yaml").write_text(text.replace("components/privileged", f"components/{component}"))
                    objects = render(mine)
                    rules.check(self, objects)
                    [spec] = [s for d in objects if d["metadata"]["name"] == "deep-ep-internode" for _, s in rules.pods(d)]
                    self.assertIn("driver", {volume["name"] for volume in spec["volumes"]})

    def test_installer(self):
        for overlay, more in (("hostnetwork", []), ("gke-a4", ["--gpus", "8", "--nics", "8"])):
            _, spec = pod(overlay, ("DaemonSet", "deep-ep-installer"))
            probe = spec["containers"][0]["readinessProbe"]["exec"]["command"]
            self.assertEqual(probe, ["/host/deep_ep/current/bin/deep_ep", "doctor", "--quick", *more])
            # The annotation says the same.
            self.assertEqual(rules.variable(spec["initContainers"][0], "EXPECT") or "", " ".join(more))
        _, spec = pod("uninstall", ("DaemonSet", "deep-ep-installer"))
        self.assertNotIn("nodeSelector", spec)
        self.assertEqual([v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v], ["/home/kubernetes/bin/deep_ep"])


class Kueue(unittest.TestCase):
    def test_names_fit(self):
        objects = {d["kind"]: d for path in (DEPLOY / "kueue").glob("*.yaml") for d in documents(path)}
        flavor, queue = objects["ResourceFlavor"], objects["ClusterQueue"]
        self.assertEqual(flavor["spec"]["topologyName"], objects["Topology"]["metadata"]["name"])
        [group] = queue["spec"]["resourceGroups"]
        self.assertEqual(group["flavors"][0]["name"], flavor["metadata"]["name"])
        self.assertEqual([r["name"] for r in group["flavors"][0]["resources"]], group["coveredResources"])
        self.assertEqual(objects["LocalQueue"]["spec"]["clusterQueue"], queue["metadata"]["name"])
        self.assertIn(f"\nKUEUE_NAME={objects['LocalQueue']['metadata']['name']}\n", (DEPLOY / "gke/env.example").read_text())
        self.assertEqual(flavor["spec"]["nodeLabels"]["cloud.google.com/gke-accelerator"], rules.A4_GPU)


main()
