"""Renders the chart as Helm would: merges values, checks them by the schema, runs the templates by mini_helm."""

import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile

import jsonschema
import kustomize
from support import DEPLOY, ROOT, run

CHART = DEPLOY / "helm/deep-ep-testbed"
GO_PATH = "/usr/share/gocode"


class Failed(Exception):
    pass


@functools.cache
def mini_helm():
    """The built program, or None where Debian's Go libraries are missing. Built once, again when its source is newer."""
    if shutil.which("go") is None or not pathlib.Path(GO_PATH, "src/github.com/Masterminds/sprig").is_dir():
        return None
    source = pathlib.Path(__file__).parent / "mini_helm/main.go"
    program = ROOT / "build/deploy/mini_helm"
    if not program.exists() or program.stat().st_mtime < source.stat().st_mtime:
        program.parent.mkdir(parents=True, exist_ok=True)
        new = program.with_suffix(f".{os.getpid()}")
        environment = {**os.environ, "GO111MODULE": "off", "GOPATH": GO_PATH, "GOFLAGS": "-p=2", "GOCACHE": str(program.parent / "go-cache")}
        status, _, errors = run(["go", "build", "-o", new, "."], cwd=source.parent, env=environment, timeout=110)
        if status != 0:
            raise Failed(f"mini_helm does not compile: {errors}")
        new.rename(program)
    return program


def merged(base, extra):
    if not isinstance(base, dict) or not isinstance(extra, dict):
        return extra
    result = dict(base)
    for key, value in extra.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = merged(base.get(key), value)
    return result


def values(*extras):
    """The chart's own values with those of files or dictionaries over them."""
    [result] = kustomize.documents(CHART / "values.yaml")
    for extra in extras:
        result = merged(result, extra if isinstance(extra, dict) else kustomize.documents(extra)[0])
    return result


def render_text(wanted, release="testbed", namespace="default"):
    schema = json.loads((CHART / "values.schema.json").read_text())
    problems = [f"{'.'.join(map(str, e.absolute_path))}: {e.message}" for e in jsonschema.Draft7Validator(schema).iter_errors(wanted)]
    if problems:
        raise Failed("; ".join(problems))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(wanted, file)
        file.flush()
        done = subprocess.run([mini_helm(), CHART, release, namespace, file.name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Failed(done.stderr)
    return done.stdout


def render(wanted, **arguments):
    return kustomize.load_all(render_text(wanted, **arguments))
