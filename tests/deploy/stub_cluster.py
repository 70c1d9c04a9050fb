#!/usr/bin/env python3
"""A stand-in for kubectl and helm, named by the first argument: a cluster that remembers what was applied, and
refuses to wait for, print the logs of, or delete what is not there, and to change the pods of a Job. What runs ends when it
is made: well, or if $RUN is Failed, not. State: the JSON file $CLUSTER."""

import json
import os
import pathlib
import re
import sys

sys.path.insert(0, os.environ["DEPLOY_TESTS"])
import kustomize

STATE = pathlib.Path(os.environ["CLUSTER"])
STANDARD_KINDS = {"jobset": "JobSet", "job": "Job", "daemonset": "DaemonSet", "pod": "Pod"}


def fail(text):
    sys.exit(f"error: {text}")


def options_of(words, flags):
    """Positional words, and the values of flags; a flag that is not in flags is refused."""
    found, rest, index = {}, [], 0
    while index < len(words):
        name, equals, value = words[index].partition("=")
        if not words[index].startswith("-") or words[index] == "-":
            rest.append(words[index])
        elif name not in flags:
            fail(f"unknown flag: {name}")
        elif equals or not flags[name]:
            found.setdefault(name, []).append(value)
        else:
            index += 1
            found.setdefault(name, []).append(words[index])
        index += 1
    return rest, found


def matches(document, selector):
    labels = document["metadata"].get("labels", {})
    for part in re.findall(r"[^,(]+ in \([^)]*\)|[^,]+", selector):
        if part.startswith("!"):
            if part[1:] in labels:
                return False
            continue
        inside = re.fullmatch(r"(\S+) in \(([^)]*)\)", part.strip())
        key, wanted = (inside[1], inside[2].split(",")) if inside else (part.split("=")[0], [part.split("=")[1]])
        if labels.get(key) not in wanted:
            return False
    return True


def key_of(document):
    return f"{document['kind']}/{document['metadata']['name']}"


def kubectl(state, words):
    flags = {"-k": 1, "-f": 1, "-l": 1, "-n": 1, "-L": 1, "-o": 1, "-c": 1, "--timeout": 1, "--for": 1, "--tail": 1, "--ignore-not-found": 0,
             "--sort-by": 1, "--all-containers": 0, "--cascade": 1, "--request-timeout": 1}  # fmt: skip
    if words[0] == "logs":
        flags["-f"] = 0
    rest, options = options_of(words, flags)
    verb, objects = rest[0], state["objects"]

    def there(name):
        kind, _, name = name.partition("/") if "/" in name else ("pod", "", name)
        key = f"{STANDARD_KINDS[kind]}/{name}"
        if key not in objects:
            fail(f'{key} "not found"')
        namespace = objects[key]["metadata"].get("namespace", "default")
        if options.get("-n", ["default"])[0] != namespace:
            fail(f"{key} is in namespace {namespace}")
        return objects[key]

    def ended(document):
        ends = {"Job": "Complete", "JobSet": "Completed", "Pod": "Succeeded"}
        return "Failed" if state["failed"].get(key_of(document)) else ends[document["kind"]]

    if verb == "delete" and len(rest) == 2 and options.get("-l"):
        for key, document in list(objects.items()):
            if key.split("/")[0] == STANDARD_KINDS[rest[1]] and matches(document, options["-l"][0]):
                if options.get("-n", ["default"])[0] == document["metadata"].get("namespace", "default"):
                    del objects[key]
    elif verb in ("apply", "delete"):
        if "-k" in options:
            documents = kustomize.render(options["-k"][0])
        else:
            text = sys.stdin.read() if options["-f"] == ["-"] else pathlib.Path(options["-f"][0]).read_text()
            documents = kustomize.load_all(text)
        documents = [d for d in documents if matches(d, options["-l"][0])] if "-l" in options else documents
        if not documents:
            fail("no objects passed to " + verb)
        for document in documents:
            if verb == "delete":
                objects.pop(key_of(document), None)
                continue
            namespace = document["metadata"].get("namespace", "default")
            if namespace != "default" and f"Namespace/{namespace}" not in {**objects, **{key_of(d): d for d in documents}}:
                fail(f'namespaces "{namespace}" not found')
            before = objects.get(key_of(document))
            if before == document:
                print(f"{key_of(document)} unchanged")
                continue
            if before is not None and document["kind"] == "Job" and before["spec"]["template"] != document["spec"]["template"]:
                fail(f"{key_of(document)} is invalid: spec.template: field is immutable")
            objects[key_of(document)] = document
            state["failed"][key_of(document)] = os.environ.get("RUN") == "Failed"
            print(f"{key_of(document)} configured")
    elif verb == "rollout":
        there(rest[2])
        print("successfully rolled out")
    elif verb == "wait":
        condition = {"Job": "condition=complete", "JobSet": "condition=Completed"}
        document = there(rest[1])
        wanted = condition.get(document["kind"], "jsonpath={.status.phase}=Succeeded")
        if options["--for"] != [wanted]:
            fail(f"{key_of(document)} never has {options['--for'][0]}")
        if ended(document) == "Failed":
            fail(f"timed out waiting for the condition on {key_of(document)}")
        print("condition met")
    elif verb == "logs":
        if "-l" not in options:
            there(rest[1]) if not rest[1].startswith("pod-") else None
        else:
            label, _, name = options["-l"][0].split(",")[0].partition("=")
            kind = {"batch.kubernetes.io/job-name": "job", "jobset.sigs.k8s.io/jobset-name": "jobset"}.get(label)
            if kind:
                there(f"{kind}/{name}")
        print("Every checked result is exact")
    elif verb in ("get", "describe"):
        if "/" in rest[1]:
            print(ended(there(rest[1])))
        elif any(option.startswith("jsonpath") for option in options.get("-o", [])):
            print("pod-0 0\npod-1 1")
        elif rest[1] == "jobset":
            print("\n".join(key for key in objects if key.startswith("JobSet/")))
    else:
        fail(f"unknown command {verb}")


def helm(state, words):
    import charts

    flags = {"--set": 1, "--set-file": 1, "-f": 1, "--namespace": 1}
    rest, options = options_of(words, flags)
    if rest[0] == "uninstall":
        release = rest[1]
        if release not in state["releases"]:
            fail(f"uninstall: Release not loaded: {release}: release: not found")
        for key in state["releases"].pop(release):
            state["objects"].pop(key, None)
    elif rest[0] == "install":
        _, release, chart = rest
        if pathlib.Path(chart).resolve().name != charts.CHART.name:
            fail(f"there is no chart {chart}")
        values = {}
        for setting in options.get("--set", []):
            path, _, value = setting.partition("=")
            place = values
            for part in path.split(".")[:-1]:
                place = place.setdefault(part, {})
            place[path.split(".")[-1]] = int(value) if value.isdigit() else value
        try:
            documents = charts.render(charts.values(values), release=release)
        except charts.Failed as failed:
            fail(str(failed))
        state["releases"][release] = [key_of(document) for document in documents]
        state["objects"].update({key_of(document): document for document in documents})
        state["failed"].update({key_of(document): os.environ.get("RUN") == "Failed" for document in documents})
    else:
        fail(f"unknown command {rest[0]}")


def main():
    state = json.loads(STATE.read_text()) if STATE.exists() else {"objects": {}, "releases": {}, "failed": {}}
    {"kubectl": kubectl, "helm": helm}[sys.argv[1]](state, sys.argv[2:])
    STATE.write_text(json.dumps(state))


main()
