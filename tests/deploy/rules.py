"""What objects for this job must keep to beyond the schemas of Kubernetes: each rule is a way in which such manifests were
broken before."""

import json
import re

import kubernetes_validate
from support import variables

KUBERNETES = "1.34"  # the first with resource.k8s.io/v1
KEYS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----|ssh-(rsa|ed25519) AAAA|\bhf_[A-Za-z0-9]{20,}|\bya29\.|\"private_key\"")
AT_RUN_TIME = re.compile(r"\b(apt-get|apt|yum|dnf|pip3?|conda|gcloud|git clone|curl|wget)\b|\breboot\b|nvidia-smi +-pm|modprobe|dpkg")
A4_GPU = "nvidia-b200"
HOST_FOLDERS = {"/dev/infiniband", "/dev/nvidiactl", "/dev/nvidia-uvm"} | {
    f"/home/kubernetes/bin/{name}" for name in ("nvidia", "gib", "deep_ep")
}
SSHD_NEEDS = {"SETUID", "SETGID", "SYS_CHROOT"}


def jobs(document):
    """The specifications of Jobs inside an object."""
    if document["kind"] == "Job":
        return [document["spec"]]
    return [job["template"]["spec"] for job in document["spec"]["replicatedJobs"]] if document["kind"] == "JobSet" else []


def pods(document):
    """(metadata, spec) of the pods of an object."""
    if document["kind"] == "Pod":
        return [(document["metadata"], document["spec"])]
    specs = jobs(document) or ([document["spec"]] if document["kind"] in ("DaemonSet", "Deployment") else [])
    return [(spec["template"].get("metadata", {}), spec["template"]["spec"]) for spec in specs]


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def variable(container, name):
    return next((item.get("value") for item in container.get("env", []) if item["name"] == name), None)


def check(test, objects, accounts=()):
    """accounts: ServiceAccounts that others make."""
    names = {(d["kind"], d["metadata"]["name"]) for d in objects} | {("ServiceAccount", name) for name in accounts}
    test.assertEqual(len({(d["kind"], d["metadata"]["name"]) for d in objects}), len(objects), "an object comes twice")
    for document in objects:
        with test.subTest(kind=document["kind"], name=document["metadata"]["name"]):
            test.assertNotRegex(json.dumps(document), KEYS)
            if document["kind"] == "JobSet":  # which Kubernetes has no schema of; its Jobs, it has
                for job in jobs(document):
                    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": document["metadata"], "spec": job}
                    kubernetes_validate.validate(job, KUBERNETES, strict=True)
            else:
                kubernetes_validate.validate(document, KUBERNETES, strict=True)
            if document["kind"] == "ConfigMap":
                for name, text in document["data"].items():
                    code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
                    test.assertFalse(name.endswith(".sh") and AT_RUN_TIME.search(code), name)
            if document["kind"] == "Service":  # pods find each other while they start
                test.assertEqual(document["spec"]["clusterIP"], "None")
                test.assertIs(document["spec"]["publishNotReadyAddresses"], True)
                selected = document["spec"]["selector"].items()
                test.assertTrue([m for d in objects for m, _ in pods(d) if selected <= m.get("labels", {}).items()])
            for role, subjects in [(document.get("roleRef"), document.get("subjects"))] if "roleRef" in document else []:
                test.assertIn((role["kind"], role["name"]), names)
                test.assertLessEqual({(one["kind"], one["name"]) for one in subjects}, names)
            for job in jobs(document):
                check_job(test, job)
            for metadata, spec in pods(document):
                check_pod(test, document, metadata, spec, names)


def check_job(test, job):
    deadline = job["activeDeadlineSeconds"]
    if job.get("completionMode") != "Indexed":
        test.assertEqual(job["backoffLimit"], 0)
        return
    # A pod that fails must not make the controller delete the others with their logs, nor the Job's own deadline.
    test.assertEqual((job["backoffLimitPerIndex"], job.get("backoffLimit"), job.get("maxFailedIndexes")), (0, None, None))
    test.assertLessEqual(job["template"]["spec"]["activeDeadlineSeconds"], deadline - 30)
    test.assertEqual(job["parallelism"], job["completions"])
    for container in job["template"]["spec"]["containers"]:
        nodes = variable(container, "TESTBED_NODES") or variable(container, "WORLD_SIZE")
        test.assertEqual(nodes, str(job["completions"]))
        words = container.get("command", [])
        if "--nodes" in words:
            test.assertEqual(words[words.index("--nodes") + 1], str(job["completions"]))


def check_pod(test, document, metadata, spec, names):
    if document["kind"] != "DaemonSet":
        test.assertEqual(spec["restartPolicy"], "Never")
        test.assertTrue(jobs(document) or spec["activeDeadlineSeconds"])
    test.assertFalse(spec.get("hostPID") or spec.get("hostIPC"), "the processes of the node are open to it")
    test.assertFalse(spec.get("priorityClassName", "").startswith("system-"), "GKE refuses it outside of kube-system")
    annotations = metadata.get("annotations") or {}
    interfaces = [item["network"] for item in json.loads(annotations.get("networking.gke.io/interfaces", "[]"))]
    test.assertEqual(len(interfaces), len(set(interfaces)))
    if spec.get("hostNetwork"):
        test.assertEqual((spec["dnsPolicy"], interfaces), ("ClusterFirstWithHostNet", []))
    test.assertNotIn("cloud.google.com/gke-nodepool", spec.get("nodeSelector", {}))
    test.assertIn(spec.get("nodeSelector", {}).get("cloud.google.com/gke-accelerator"), (None, A4_GPU))
    if any("nvidia.com/gpu" in one.get("resources", {}).get("limits", {}) or one.get("resources", {}).get("claims") for one in containers(spec)):
        [term] = spec["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        test.assertEqual(term["topologyKey"], "kubernetes.io/hostname")
        test.assertLessEqual(term["labelSelector"]["matchLabels"].items(), metadata["labels"].items())
    if spec.get("subdomain"):
        test.assertIn(("Service", spec["subdomain"]), names)
    if spec.get("serviceAccountName"):
        test.assertIn(("ServiceAccount", spec["serviceAccountName"]), names)
    for claim in spec.get("resourceClaims", []):
        test.assertIn(("ResourceClaimTemplate", claim["resourceClaimTemplateName"]), names)
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    for volume in volumes.values():
        if "configMap" in volume:
            test.assertIn(("ConfigMap", volume["configMap"]["name"]), names)
        test.assertIn(volume.get("hostPath", {}).get("path"), HOST_FOLDERS | {None})
    mounts = [(container, mount) for container in containers(spec) for mount in container.get("volumeMounts", [])]
    test.assertEqual({mount["name"] for _, mount in mounts}, set(volumes))
    for _, mount in mounts:
        host = volumes[mount["name"]].get("hostPath", {}).get("path")
        test.assertTrue(mount.get("readOnly") or host in (None, "/home/kubernetes/bin/deep_ep"), f"it can write the node's {host}")
    for container in containers(spec):
        check_container(test, container)
        master = variable(container, "MASTER_ADDR")
        name = document["metadata"]["name"]
        if document["kind"] == "JobSet":
            test.assertEqual(document["spec"]["network"], {**document["spec"]["network"], "enableDNSHostnames": True, "publishNotReadyAddresses": True})
            test.assertEqual(master, f"{name}-workload-0-0.{document['spec']['network']['subdomain']}")
        elif master is not None:
            test.assertEqual(master, f"{name}-0.{spec['subdomain']}")


def check_container(test, container):
    image = container["image"]
    test.assertRegex(image, r"(@sha256:[0-9a-f]{64}|:(?!latest$)[A-Za-z0-9_][A-Za-z0-9._-]*)$")
    security = container["securityContext"]
    if not security.get("privileged"):
        test.assertEqual(security["capabilities"]["drop"], ["ALL"])
    paths = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
    test.assertEqual(len(paths), len(set(paths)))
    allowed = {"IPC_LOCK"} | (SSHD_NEEDS if "/etc/testbed-ssh" in paths else set())
    test.assertLessEqual(set(security.get("capabilities", {}).get("add", [])), allowed)
    test.assertNotRegex("\n".join(container.get("command", []) + container.get("args", [])), AT_RUN_TIME)
    names = [item["name"] for item in container.get("env", [])]
    test.assertEqual(len(names), len(set(names)))
    test.assertLessEqual({name for name in names if name.startswith("DEEP_EP_")}, variables())
