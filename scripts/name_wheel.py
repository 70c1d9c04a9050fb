#!/usr/bin/env python3
"""scripts/name_wheel.py WHEEL FOLDER [NAME=URL...]: writes the wheel to FOLDER under the name of its kind, and prints that file.

deep_ep_cpu runs on CPUs only; deep_ep_cu13 has GPU code, made by CUDA 13. The kind is what the command inside says of
itself, so no name can promise what a wheel does not hold. A name and not a local version (0.2.0+cpu), as PyPI takes
none of those. NAME=URL are addresses for the metadata; with Source, links of the description into the sources lead there.
What is linked in of other projects comes with their licences.
RUN_COMMAND: what runs the command of another architecture, for example qemu-aarch64-static.
"""

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

DISTRIBUTION = "deep_ep"
# Whose code is in the binaries, and the packages whose file "copyright" holds the licence. (Boost's asks for nothing
# where there is no source.)
LINKED = {"CLI11": "libcli11-dev", "fmt": "libfmt-dev", "nlohmann-json": "nlohmann-json3-dev"}


def licences(documentation=pathlib.Path("/usr/share/doc")):
    """Name of a file -> its bytes. Where a system keeps them elsewhere, who builds there adds them."""
    found = {project: documentation / package / "copyright" for project, package in LINKED.items()}
    try:
        for file in importlib.metadata.files("pybind11") or []:
            if file.name.startswith("LICENSE"):
                found["pybind11"] = file.locate()
    except importlib.metadata.PackageNotFoundError:
        pass
    for project in [project for project in found if not found[project].is_file()]:
        print(f"name_wheel: the licence of {project} is missing, as there is no {found.pop(project)}", file=sys.stderr)
    return {f"linked/{project}.txt": pathlib.Path(file).read_bytes() for project, file in found.items()}


def kind_of(wheel):
    """``cpu`` or ``cu13``."""
    with tempfile.TemporaryDirectory() as folder:
        command = wheel.extract(f"{DISTRIBUTION}/bin/deep_ep", folder)
        os.chmod(command, 0o755)
        asked = [*os.environ.get("RUN_COMMAND", "").split(), command, "--version"]
        said = subprocess.run(asked, stdout=subprocess.PIPE, check=True, universal_newlines=True).stdout
    cuda = re.search(r"^ +cuda +(?:(none)|(\d+)\.)", said, re.MULTILINE)
    if cuda is None:
        raise SystemExit(f"name_wheel: deep_ep --version says nothing of CUDA: {said!r}")
    return "cpu" if cuda.group(1) else f"cu{cuda.group(2)}"


def named(metadata, name, urls, licence_files):
    """METADATA under the other name, with the addresses and the licences."""
    head, blank, text = metadata.partition("\n\n")
    lines = [f"Name: {name}" if line == f"Name: {DISTRIBUTION}" else line for line in head.split("\n")]
    lines += [f"Project-URL: {label}, {address}" for label, address in urls]
    lines += [f"License-File: {file}" for file in licence_files]
    source = dict(urls).get("Source")
    if source:  # an index shows the description without the files beside it
        for begin, kind in ((r"\]\(", "blob"), (r'src(?:set)?="', "raw")):
            text = re.sub(rf"({begin})(?!https?:|#)", rf"\g<1>{source}/{kind}/HEAD/", text)
    return "\n".join(lines) + blank + text


def record_line(name, data):
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(data))]


def rename(source, folder, urls):
    with zipfile.ZipFile(source) as wheel:
        kind = kind_of(wheel)
        name = f"{DISTRIBUTION}_{kind}"
        parts = source.name.split("-")
        if parts[0] != DISTRIBUTION:
            raise SystemExit(f"name_wheel: {source.name} is not a wheel of {DISTRIBUTION}, or has its name already")
        old, new = (f"{distribution}-{parts[1]}.dist-info/" for distribution in (DISTRIBUTION, name))
        target = folder / "-".join([name] + parts[1:])
        linked = licences()
        record = io.StringIO()
        rows = csv.writer(record, lineterminator="\n")
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as out:
            for entry in wheel.infolist():
                data = wheel.read(entry)
                if entry.filename.startswith(old):
                    entry.filename = new + entry.filename[len(old) :]
                if entry.filename == new + "RECORD":
                    continue
                if entry.filename == new + "METADATA":
                    data = named(data.decode(), name, urls, linked).encode()
                out.writestr(entry, data)
                rows.writerow(record_line(entry.filename, data))
            for file, data in linked.items():
                out.writestr(f"{new}licenses/{file}", data)
                rows.writerow(record_line(f"{new}licenses/{file}", data))
            rows.writerow([new + "RECORD", "", ""])
            out.writestr(new + "RECORD", record.getvalue())
    return target


def main(arguments):
    if len(arguments) < 2 or not all(re.fullmatch(r"[^=,]+=https?://\S+", given) for given in arguments[2:]):
        raise SystemExit(__doc__.split("\n", 1)[0])
    urls = [given.split("=", 1) for given in arguments[2:]]
    print(rename(pathlib.Path(arguments[0]), pathlib.Path(arguments[1]), urls))


if __name__ == "__main__":
    main(sys.argv[1:])
