"""Rules that a schema cannot say: what must fit together in a set of objects, and what must never be in one.

Each rule answers a way in which manifests for this job have been broken before; planted_test.py breaks them again.
"""

import json
import re

from kustomize import pod_specs

KEYS = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----|ssh-(rsa|ed25519) AAAA|\bhf_[A-Za-z0-9]{20,}|\bya29\.|\"private_key\"")
AT_RUN_TIME = re.compile(r"\b(apt-get|apt|yum|dnf|pip3?|conda|gcloud|git clone|curl|wget)\b|\breboot\b|nvidia-smi +-pm|modprobe|dpkg")
GPU = "nvidia.com/gpu"
A4_GPU = "nvidia-b200"
HOST_FOLDERS = {
    "/dev/infiniband",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm",
    "/home/kubernetes/bin/nvidia",
    "/home/kubernetes/bin/gib",
    "/home/kubernetes/bin/deep_ep",
}
SSHD_NEEDS = {"SETUID", "SETGID", "SYS_CHROOT"}


def name_of(document):
    return f"{document['kind']}/{document['metadata']['name']}"


def templates(document):
    """(metadata, spec) of the pods of an object."""
    if document["kind"] == "Pod":
        yield document["metadata"], document["spec"]
    elif document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            template = job["template"]["spec"]["template"]
            yield template.get("metadata", {}), template["spec"]
    else:
        for spec in pod_specs(document):
            yield document["spec"]["template"].get("metadata", {}), spec


def job_specs(document):
    if document["kind"] == "Job":
        yield document["spec"]
    elif document["kind"] == "JobSet":
        for job in document["spec"]["replicatedJobs"]:
            yield job["template"]["spec"]


def containers(spec):
    return spec.get("initContainers", []) + spec["containers"]


def variable(container, name):
    return next((item.get("value") for item in container.get("env", []) if item["name"] == name), None)


def uses_gpus(spec):
    for container in containers(spec):
        resources = container.get("resources", {})
        if GPU in resources.get("limits", {}) or resources.get("claims"):
            return True
    return False


def runs_deep_ep(spec):
    words = [str(word) for one in spec["containers"] for word in one.get("command", []) + one.get("args", [])]
    return any(word in ("bench", "launch") or word.endswith("/run.sh") for word in words)


def problems_of(objects, variables=None, accounts=()):
    """All problems of a set of objects. variables: what `deep_ep env` knows; accounts: ServiceAccounts that others make."""
    for document in objects:
        name = name_of(document)
        if KEYS.search(json.dumps(document)):
            yield f"{name}: there is key material"
        if document["kind"] == "ConfigMap":
            for key, text in document.get("data", {}).items():
                code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
                if key.endswith(".sh") and AT_RUN_TIME.search(code):
                    yield f"{name}: {key} changes or loads something at run time: {AT_RUN_TIME.search(code)[0]}"
        for job in job_specs(document):
            yield from job_problems(name, job)
        for metadata, spec in templates(document):
            yield from pod_problems(name, document, metadata, spec, variables)
    yield from reference_problems(objects, set(accounts))


def job_problems(name, job):
    if job.get("completionMode") != "Indexed" and job.get("backoffLimit") != 0:
        yield f"{name}: backoffLimit is not 0: what failed would be tried again"
    if not job.get("activeDeadlineSeconds"):
        yield f"{name}: there is no activeDeadlineSeconds"
    if job["template"]["spec"].get("restartPolicy") != "Never":
        yield f"{name}: restartPolicy is not Never"
    if job.get("completionMode") == "Indexed":
        if job.get("backoffLimitPerIndex") != 0:
            yield f"{name}: backoffLimitPerIndex is not 0: the other pods would wait for one that starts again"
        if "backoffLimit" in job or "maxFailedIndexes" in job:
            yield f"{name}: a pod that fails makes the controller delete the others with their logs: no backoffLimit, no maxFailedIndexes"
        if not job["template"]["spec"].get("activeDeadlineSeconds", 10**9) <= job.get("activeDeadlineSeconds", 0) - 30:
            yield f"{name}: its pods have no activeDeadlineSeconds before the Job's, which deletes them with their logs"
        if job.get("parallelism") != job.get("completions"):
            yield f"{name}: parallelism {job.get('parallelism')} is not completions {job.get('completions')}"
        for container in job["template"]["spec"]["containers"]:
            nodes = variable(container, "DEEP_EP_NODES")
            if nodes is not None and nodes != str(job.get("completions")):
                yield f"{name}: DEEP_EP_NODES {nodes} is not completions {job.get('completions')}"
            words = container.get("command", []) + container.get("args", [])
            if "--nodes" in words and words[words.index("--nodes") + 1] != str(job.get("completions")):
                yield f"{name}: --nodes is not completions {job.get('completions')}"


def pod_problems(name, document, metadata, spec, variables):
    if spec.get("priorityClassName", "").startswith("system-") and document["metadata"].get("namespace") != "kube-system":
        yield f"{name}: GKE refuses priorityClassName {spec['priorityClassName']} outside of kube-system"
    if document["kind"] == "Pod":
        if spec.get("restartPolicy") != "Never":
            yield f"{name}: restartPolicy is not Never"
        if not spec.get("activeDeadlineSeconds"):
            yield f"{name}: there is no activeDeadlineSeconds"
    if spec.get("hostPID") or spec.get("hostIPC"):
        yield f"{name}: the processes of the node are open to it"
    annotations = metadata.get("annotations", {})
    interfaces = annotations.get("networking.gke.io/interfaces")
    if interfaces is not None:
        try:
            networks = [item["network"] for item in json.loads(interfaces)]
            if sorted(networks) != sorted(set(networks)):
                yield f"{name}: an interface's network comes twice"
        except (ValueError, KeyError, TypeError):
            yield f"{name}: the annotation networking.gke.io/interfaces is no list of interfaces"
        if spec.get("hostNetwork"):
            yield f"{name}: interfaces of its own, and hostNetwork: one of them has no effect"
    if spec.get("hostNetwork") and spec.get("dnsPolicy") != "ClusterFirstWithHostNet":
        yield f"{name}: hostNetwork without dnsPolicy ClusterFirstWithHostNet: the names of services are unknown"
    if any(key.startswith("gke-gcsfuse") for key in annotations) and not any(
        volume.get("csi", {}).get("driver") == "gcsfuse.csi.storage.gke.io" for volume in spec.get("volumes", [])
    ):
        yield f"{name}: the gcsfuse annotation without such a volume"
    for key in ("kueue.x-k8s.io/podset-required-topology", "kueue.x-k8s.io/podset-preferred-topology"):
        if key in annotations:
            if annotations[key] == "kubernetes.io/hostname" and "required" in key:
                yield f"{name}: all pods on one node, by {key}"
            if "kueue.x-k8s.io/queue-name" not in document["metadata"].get("labels", {}):
                yield f"{name}: {key} without a queue has no effect"
    yield from gpu_problems(name, metadata, spec)
    yield from volume_problems(name, spec)
    seen = set()
    for container in containers(spec):
        where = f"{name}: container {container['name']}"
        if container["name"] in seen:
            yield f"{where} comes twice"
        seen.add(container["name"])
        yield from container_problems(where, container, variables)


def gpu_problems(name, metadata, spec):
    if not uses_gpus(spec):
        if runs_deep_ep(spec):
            yield f"{name}: it asks for no GPU"
        return
    terms = spec.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution", [])
    apart = [
        term
        for term in terms
        if term.get("topologyKey") == "kubernetes.io/hostname"
        and set(term.get("labelSelector", {}).get("matchLabels", {"": None}).items()) <= set(metadata.get("labels", {}).items())
    ]
    if not apart:
        yield f"{name}: no anti-affinity keeps its pods on nodes of their own"
    accelerator = spec.get("nodeSelector", {}).get("cloud.google.com/gke-accelerator")
    if accelerator not in (None, A4_GPU):
        yield f"{name}: no node has the label cloud.google.com/gke-accelerator={accelerator}, A4 nodes have {A4_GPU}"
    if "cloud.google.com/gke-nodepool" in spec.get("nodeSelector", {}):
        yield f"{name}: it is bound to a node pool by name"


def volume_problems(name, spec):
    volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
    if "" in volumes:
        yield f"{name}: a volume has an empty name"
    mounted = set()
    for container in containers(spec):
        paths = set()
        for mount in container.get("volumeMounts", []):
            mounted.add(mount["name"])
            if mount["name"] not in volumes:
                yield f"{name}: container {container['name']} mounts '{mount['name']}', which is no volume"
                continue
            if mount["mountPath"] in paths:
                yield f"{name}: container {container['name']} mounts two volumes at {mount['mountPath']}"
            paths.add(mount["mountPath"])
            host = volumes[mount["name"]].get("hostPath", {}).get("path")
            if host is not None and host != "/home/kubernetes/bin/deep_ep" and not mount.get("readOnly"):
                yield f"{name}: container {container['name']} can write the node's folder {host}"
    for volume in volumes:
        if volume not in mounted:
            yield f"{name}: nothing mounts the volume '{volume}'"
    for volume in volumes.values():
        path = volume.get("hostPath", {}).get("path")
        if path is not None and path not in HOST_FOLDERS:
            yield f"{name}: it mounts the node's {path}"


def container_problems(where, container, variables):
    image = container["image"]
    if not re.search(r"(@sha256:[0-9a-f]{64}|:[A-Za-z0-9_][A-Za-z0-9._-]*)$", image) or image.endswith(":latest"):
        yield f"{where}: the image '{image}' has no digest or fixed tag"
    security = container.get("securityContext", {})
    if not security.get("privileged") and security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield f"{where}: it keeps capabilities"
    mounts = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
    allowed = {"IPC_LOCK"} | (SSHD_NEEDS if "/etc/testbed-ssh" in mounts else set())
    if set(security.get("capabilities", {}).get("add", [])) - allowed:
        yield f"{where}: it adds capabilities other than IPC_LOCK"
    text = "\n".join(str(word) for word in container.get("command", []) + container.get("args", []))
    found = AT_RUN_TIME.search(text)
    if found:
        yield f"{where}: it changes or loads something at run time: {found[0]}"
    if re.search(r"sleep +(infinity|inf)\b", text):
        yield f"{where}: it never ends"
    names = [item["name"] for item in container.get("env", [])]
    for item in container.get("env", []):
        name = item["name"]
        if names.count(name) > 1:
            yield f"{where}: {name} is set twice"
        if name.startswith("DEEP_EP_") and variables is not None and name not in variables:
            yield f"{where}: the variable {name} is unknown"
        if re.search(r"TOKEN|PASSWORD|SECRET", name) and "value" in item:
            yield f"{where}: {name} is written out"


def reference_problems(objects, accounts):
    def named(kind):
        return {document["metadata"]["name"]: document for document in objects if document["kind"] == kind}

    namespaced = [d for d in objects if d["kind"] not in ("Namespace", "ClusterRole", "ClusterRoleBinding")]
    services = named("Service")
    pods = [(name_of(d), d, metadata, spec) for d in objects for metadata, spec in templates(d)]
    keys = [(name_of(d), d["metadata"].get("namespace")) for d in namespaced]
    for key in sorted(set(keys), key=str):
        if keys.count(key) > 1:
            yield f"{key[0]}: it comes twice"
    for name, document, metadata, spec in pods:
        subdomain = spec.get("subdomain")
        if subdomain is not None and subdomain not in services:
            yield f"{name}: there is no Service '{subdomain}'"
        for container in containers(spec):
            master = variable(container, "MASTER_ADDR")
            if master is not None:
                yield from master_problems(name, document, spec, services, master)
            for source in container.get("envFrom", []):
                config = source.get("configMapRef", {}).get("name")
                if config is not None and config not in named("ConfigMap"):
                    yield f"{name}: there is no ConfigMap '{config}'"
        for volume in spec.get("volumes", []):
            config = volume.get("configMap", {}).get("name")
            if config is not None and config not in named("ConfigMap"):
                yield f"{name}: there is no ConfigMap '{config}'"
            claim = volume.get("persistentVolumeClaim", {})
            if claim and not claim.get("claimName"):
                yield f"{name}: the volume '{volume['name']}' names no claim"
        account = spec.get("serviceAccountName")
        if account is not None and document["metadata"].get("namespace") and account not in accounts | set(named("ServiceAccount")):
            yield f"{name}: there is no ServiceAccount '{account}'"
        templates_named = set(named("ResourceClaimTemplate"))
        for claim in spec.get("resourceClaims", []):
            if claim["resourceClaimTemplateName"] not in templates_named:
                yield f"{name}: there is no ResourceClaimTemplate '{claim['resourceClaimTemplateName']}'"
        selector = document["spec"].get("selector", {}).get("matchLabels") if document["kind"] != "Pod" else None
        if selector and not set(selector.items()) <= set(metadata.get("labels", {}).items()):
            yield f"{name}: its selector does not select its pods"
    for service in services.values():
        selected = service["spec"].get("selector", {}).items()
        if not any(selected <= metadata.get("labels", {}).items() for _, _, metadata, _ in pods):
            yield f"{name_of(service)}: it selects no pod"
        if service["spec"].get("clusterIP") != "None" or not service["spec"].get("publishNotReadyAddresses"):
            yield f"{name_of(service)}: pods that start cannot find each other: clusterIP None and publishNotReadyAddresses are needed"
    for document in objects:
        if document["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            if document["roleRef"]["name"] not in named(document["roleRef"]["kind"]):
                yield f"{name_of(document)}: there is no {document['roleRef']['kind']} '{document['roleRef']['name']}'"
            for subject in document["subjects"]:
                if subject["name"] not in named("ServiceAccount"):
                    yield f"{name_of(document)}: there is no ServiceAccount '{subject['name']}'"


def master_problems(name, document, spec, services, master):
    host, _, service = master.partition(".")
    if document["kind"] == "JobSet":
        job = document["spec"]["replicatedJobs"][0]["name"]
        wanted = f"{document['metadata']['name']}-{job}-0-0.{document['spec']['network'].get('subdomain')}"
        if not document["spec"]["network"].get("enableDNSHostnames"):
            yield f"{name}: its pods have no names: enableDNSHostnames is needed"
    else:
        wanted = f"{document['metadata']['name']}-0.{spec.get('subdomain')}"
        if service not in services:
            yield f"{name}: MASTER_ADDR {master}: there is no Service '{service}'"
    if master != wanted:
        yield f"{name}: MASTER_ADDR is {master}, the first pod is {wanted}"
