"""Prints the files of kernel modules and of all that they need, needs first: modules.py FOLDER NAME..."""

import os
import sys

folder, names = sys.argv[1], sys.argv[2:]


def module_name(path):
    return os.path.basename(path).split(".ko")[0].replace("-", "_")


needs = {}
with open(os.path.join(folder, "modules.dep"), encoding="utf-8") as lines:
    for line in lines:
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
with open(os.path.join(folder, "modules.builtin"), encoding="utf-8") as lines:
    built_in = {module_name(line.strip()) for line in lines}
paths = {module_name(path): path for path in needs}

order = []


def visit(path):
    for need in reversed(needs[path]):
        visit(need)
    if path not in order:
        order.append(path)


for name in names:
    if name in paths:
        visit(paths[name])
    elif name not in built_in:
        sys.exit(f"rxe: the kernel package has no module {name}")
print("\n".join(order))
