"""The part of kustomize that deploy/k8s uses: resources, components, patches (strategic merge with deletions, and JSON
patches), images, labels. What it does not know it refuses. Where kubectl is installed, a test compares the two."""

import copy
import pathlib

import yaml

# The keys by which the lists of a manifest are merged; other lists are replaced.
MERGE_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
}
KNOWN = {"apiVersion", "kind", "resources", "components", "patches", "images", "labels"}


LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Refused(Exception):
    pass


def load_all(text):
    return [document for document in yaml.load_all(text, LOADER) if document is not None]


def documents(path):
    return load_all(pathlib.Path(path).read_text())


def merge(base, patch):
    """Strategic merge: a new value."""
    if not isinstance(base, dict) or not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = dict(base)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, list) and key in MERGE_KEYS:
            merged = merge_list(result.get(key) or [], value, MERGE_KEYS[key])
            if merged:
                result[key] = merged
            else:
                result.pop(key, None)
        elif isinstance(value, dict):
            merged = merge(result.get(key) or {}, value)
            # Where only deletions were asked for, nothing comes to be.
            if merged or key in result or not value:
                result[key] = merged
        else:
            result[key] = copy.deepcopy(value)
    return result


def merge_list(base, patch, key):
    result = list(base)
    for item in patch:
        found = [index for index, old in enumerate(result) if old.get(key) == item[key]]
        if item.get("$patch") == "delete":
            if not found:
                raise Refused(f"nothing to delete: {key} {item[key]}")
            result = [old for old in result if old.get(key) != item[key]]
        elif found:
            result[found[0]] = merge(result[found[0]], item)
        else:
            # New items come first, as kustomize has it.
            new = [old for old in patch if not any(old[key] == one.get(key) for one in base)]
            result.insert([one[key] for one in new].index(item[key]), copy.deepcopy(item))
    return result


def apply_json_patch(document, operations):
    for operation in operations:
        parts = [part.replace("~1", "/").replace("~0", "~") for part in operation["path"].lstrip("/").split("/")]
        parent = document
        for part in parts[:-1]:
            parent = parent[int(part)] if isinstance(parent, list) else parent[part]
        last = int(parts[-1]) if isinstance(parent, list) else parts[-1]
        present = last < len(parent) if isinstance(parent, list) else last in parent
        kind = operation["op"]
        if kind in ("remove", "replace") and not present:
            raise Refused(f"{kind} {operation['path']}: there is nothing")
        if kind == "remove":
            del parent[last]
        elif kind == "replace" or (kind == "add" and isinstance(parent, dict)):
            parent[last] = copy.deepcopy(operation["value"])
        else:
            raise Refused(f"operation {kind}")


def patched(objects, patch, folder):
    text = (folder / patch["path"]).read_text() if "path" in patch else patch["patch"]
    [content] = load_all(text)
    target = patch["target"]
    if not set(target) <= {"kind", "name"} or not set(patch) <= {"path", "patch", "target"}:
        raise Refused(f"patch {patch}")
    result, hits = [], 0
    for document in objects:
        if document["kind"] != target["kind"] or document["metadata"]["name"] != target["name"]:
            result.append(document)
            continue
        hits += 1
        if isinstance(content, list):
            document = copy.deepcopy(document)
            apply_json_patch(document, content)
        elif content.get("$patch") == "delete":
            continue
        else:
            document = merge(document, content)
        result.append(document)
    if hits == 0:
        raise Refused(f"{folder}: no object is the patch's target {target}")
    return result


def pod_specs(document):
    """The pod specifications inside an object."""
    if document["kind"] == "Pod":
        yield document["spec"]
    elif document["kind"] in ("Job", "DaemonSet", "Deployment", "StatefulSet"):
        yield document["spec"]["template"]["spec"]


def replace_images(objects, images):
    for document in objects:
        for spec in pod_specs(document):
            for container in spec.get("initContainers", []) + spec["containers"]:
                for image in images:
                    if container["image"].split("@")[0].rpartition(":")[0] == image["name"] or container["image"] == image["name"]:
                        new = image.get("newName", image["name"])
                        if "digest" in image:
                            new += "@" + image["digest"]
                        elif "newTag" in image:
                            new += ":" + image["newTag"]
                        container["image"] = new
                        break


def add_labels(objects, labels):
    for entry in labels:
        if set(entry) - {"pairs", "includeSelectors", "includeTemplates"} or entry.get("includeSelectors"):
            raise Refused(f"labels {entry}")
        for document in objects:
            document["metadata"].setdefault("labels", {}).update(entry["pairs"])
            template = document.get("spec", {}).get("template") if entry.get("includeTemplates") else None
            if isinstance(template, dict):
                template["metadata"].setdefault("labels", {}).update(entry["pairs"])


def transform(folder, objects):
    folder = pathlib.Path(folder).resolve()
    [kustomization] = documents(folder / "kustomization.yaml")
    if set(kustomization) - KNOWN:
        raise Refused(f"{folder}: {sorted(set(kustomization) - KNOWN)}")
    for resource in kustomization.get("resources", []):
        path = folder / resource
        objects = objects + (transform(path, []) if path.is_dir() else copy.deepcopy(documents(path)))
    for component in kustomization.get("components", []):
        objects = transform(folder / component, objects)
    for patch in kustomization.get("patches", []):
        objects = patched(objects, patch, folder)
    objects = copy.deepcopy(objects)
    add_labels(objects, kustomization.get("labels", []))
    replace_images(objects, kustomization.get("images", []))
    return objects


def render(folder):
    return transform(folder, [])
