"""From a matrix of nearness to a tree of PCIe switches and CPUs that has it."""

from itertools import combinations

from collc.machine import speeds
from collc.machine.graph import wire
from collc.machine.readers import attributes
from collc.machine.readers.found import NVSWITCH, Found, Nic
from collc.machine.readers.matrix import NEARNESS, Matrix

# What joins the devices that are as near as that, and how it is called.
_JOINTS = {1: ("switch", "pci"), 2: ("switch", "pcis"), 3: ("cpu", "bridge"), 4: ("cpu", "cpu")}
_FAR = 5
_NAMES = {level: name for name, level in reversed(NEARNESS.items())}


def read(matrix: Matrix) -> Found:
    """The node of a matrix. PCIe has the bandwidth of the GPU model, None here."""
    found = Found(matrix.file, matrix.notes)
    names = {gpu: f"gpu{i}" for i, gpu in enumerate(matrix.gpus)}
    names |= {nic: f"nic{i}" for i, nic in enumerate(matrix.nics)}
    found.gpus = [names[gpu] for gpu in matrix.gpus]
    for device in matrix.devices:
        name = names[device]
        found.graph.add_node(name, kind="gpu" if device in matrix.gpus else "nic")
        if device in matrix.nics:
            called = matrix.names.get(device, device)
            found.nics[name] = Nic(None, attributes.network(called))
    _tree(matrix, [names[device] for device in matrix.devices], found)
    _nvlinks(matrix, names, found)
    return found


def _tree(matrix: Matrix, names: list[str], found: Found) -> None:
    """Joins the nearest first: each joint is above those that it joins."""
    near = _levels(matrix)
    n = len(names)
    top = list(names)
    for level, (kind, called) in _JOINTS.items():
        groups: list[list[int]] = []
        for i in range(n):
            group = next((g for g in groups if near[g[0]][i] <= level), None)
            if group is None:
                groups.append([i])
            else:
                group.append(i)
        made = 0
        for group in groups:
            below = list(dict.fromkeys(top[i] for i in group))
            if len(below) == 1 and level < 4:
                continue
            joint, made = f"{called}{made}", made + 1
            found.graph.add_node(joint, kind=kind)
            for name in below:
                end = speeds.PCIE_TO_GPU if name in found.gpus else speeds.PCIE_HOP
                wire(found.graph, name, joint, "pcie", 0.0, end)  # the model has the bandwidth
            for i in group:
                top[i] = joint
    for a, b in combinations(dict.fromkeys(top), 2):
        wire(found.graph, a, b, "socket", speeds.UNKNOWN_SOCKET, speeds.SOCKET_HOP)
        found.notes.add(0, "10 GB/s between sockets are assumed; a matrix does not say")


def _levels(matrix: Matrix) -> list[list[int]]:
    """How near each is to each, also where NVLinks hide it: no farther than by way of a third."""
    n = len(matrix.devices)
    said = [[NEARNESS.get(cell, 0) for cell in row] for row in matrix.cells]
    near = [[0 if i == j else said[i][j] or _FAR for j in range(n)] for i in range(n)]
    for i, j in combinations(range(n), 2):
        together = matrix.numa[i] and matrix.numa[i] == matrix.numa[j]
        if not said[i][j] and together:
            near[i][j] = near[j][i] = 4
    for k in range(n):
        for i in range(n):
            via = near[i][k]
            near[i] = [min(direct, max(via, on)) for direct, on in zip(near[i], near[k])]
    for i in range(n):
        for j in range(i):
            if said[i][j] and near[i][j] < said[i][j]:
                a, b = matrix.devices[i], matrix.devices[j]
                matrix.notes.add(
                    matrix.lines[i],
                    f"{a} to {b} is {matrix.cells[i][j]}, but by way of a third device it is "
                    f"{_NAMES[near[i][j]]}, which is assumed",
                )
    return near


def _nvlinks(matrix: Matrix, names: dict[str, str], found: Found) -> None:
    """NVLinks to an NVSwitch where a GPU shows more than it can have, else to each other."""
    for group in _joined(matrix):
        counts = {_count(matrix.cells[i][j]) for i, j in combinations(group, 2)}
        each = max(sum(_count(matrix.cells[i][j]) for j in group) for i in group)
        if len(counts) == 1 and each > speeds.NVLINKS:  # all pairs alike
            (count,) = counts
            switch = f"{NVSWITCH}{'' if not found.nvlinks else len(found.nvlinks)}"
            for i in group:
                found.nvlinks[names[matrix.devices[i]], switch] = count
            continue
        for i, j in combinations(group, 2):
            if count := _count(matrix.cells[i][j]):
                a, b = names[matrix.devices[i]], names[matrix.devices[j]]
                found.nvlinks[a, b] = found.nvlinks[b, a] = count
        if each > speeds.NVLINKS:
            line = min(matrix.lines[i] for i in group)
            found.notes.add(line, f"a GPU with {each} NVLinks; each pair is taken to have its own")


def _joined(matrix: Matrix) -> list[list[int]]:
    """The GPUs that NVLinks join, group by group."""
    left = [i for i, device in enumerate(matrix.devices) if device in matrix.gpus]
    groups = []
    while left:
        group, fresh = [left[0]], [left[0]]
        while fresh:
            at = fresh.pop()
            more = [j for j in left if j not in group and _count(matrix.cells[at][j])]
            group, fresh = group + more, fresh + more
        left = [i for i in left if i not in group]
        groups.append(sorted(group))
    return groups


def _count(cell: str) -> int:
    return int(cell[2:]) if cell.startswith("NV") else 0
