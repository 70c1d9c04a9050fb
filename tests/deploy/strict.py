"""Objects against what Kubernetes knows: an unknown field, a wrong type or a missing field is a problem. Built-in kinds are
checked by the models of the Python client, the others by the small schemas in schemas/."""

import functools
import json
import pathlib
import re

import jsonschema
from kubernetes import client

CONFIGURATION = client.Configuration()
BUILT_IN = re.compile(r"(v1|apps/v1|batch/v1|rbac\.authorization\.k8s\.io/v1|resource\.k8s\.io/v1)")
SCALARS = {"str": str, "int": int, "bool": bool, "float": (int, float)}


@functools.cache
def schemas():
    folder = pathlib.Path(__file__).parent / "schemas"
    return {key: schema for path in sorted(folder.glob("*.json")) for key, schema in json.loads(path.read_text()).items()}


def problems_of(document):
    kind = f"{document.get('apiVersion')} {document.get('kind')}"
    name = f"{document.get('kind')}/{document.get('metadata', {}).get('name')}"
    if kind in schemas():
        validator = jsonschema.Draft7Validator(schemas()[kind])
        for error in validator.iter_errors(document):
            yield f"{name}: {'.'.join(map(str, error.absolute_path))}: {error.message}"
        for path, model in schemas()[kind].get("x-models", {}).items():
            for place, value in values_at(document, path.split(".")):
                yield from walk(value, model, f"{name}: {place}")
        yield from walk(document["metadata"], "V1ObjectMeta", f"{name}: metadata")
        return
    model = "V1" + str(document.get("kind"))
    if not BUILT_IN.fullmatch(str(document.get("apiVersion"))) or not hasattr(client, model):
        yield f"{name}: the kind '{kind}' is unknown"
        return
    yield from walk(document, model, name)


def values_at(value, path, place=""):
    if not path:
        yield place, value
    elif path[0] == "*":
        for index, item in enumerate(value):
            yield from values_at(item, path[1:], f"{place}[{index}]")
    elif path[0] in value:
        yield from values_at(value[path[0]], path[1:], f"{place}.{path[0]}")


def walk(value, model, place):
    if model in SCALARS:
        if not isinstance(value, SCALARS[model]) or (isinstance(value, bool) and model != "bool"):
            yield f"{place}: {value!r} is no {model}"
        return
    if model in ("object", "datetime"):
        return
    found = re.fullmatch(r"(list|dict)[\[(](.*)[\])]", model)
    if found and found[1] == "list":
        if not isinstance(value, list):
            yield f"{place}: {value!r} is no list"
            return
        for index, item in enumerate(value):
            yield from walk(item, found[2], f"{place}[{index}]")
        return
    if not isinstance(value, dict):
        yield f"{place}: {value!r} is no object"
        return
    if found:
        # Quantities may be written as numbers.
        quantity = re.search(r"\.(requests|limits|capacity)$", place)
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"{place}: the key {key!r} is no str"
            if quantity and isinstance(item, (int, float)) and not isinstance(item, bool):
                continue
            yield from walk(item, found[2].split(",", 1)[1].strip(), f"{place}.{key}")
        return
    cls = getattr(client, model)
    attributes = {name: attribute for attribute, name in cls.attribute_map.items()}
    for key, item in value.items():
        if key not in attributes:
            yield f"{place}: the field {key!r} is unknown"
        elif item is None:
            yield f"{place}.{key}: there is no value"
        else:
            yield from walk(item, cls.openapi_types[attributes[key]], f"{place}.{key}")
    try:
        cls(**{attributes[key]: item for key, item in value.items() if key in attributes},
            local_vars_configuration=CONFIGURATION)
    except ValueError as error:
        yield f"{place}: {error}"
