"""Pods of GPU models, by a few numbers."""

from dataclasses import replace

import numpy as np

from collc.machine.uniform import two_level

US, GB, MIB = 1e-6, 1e9, 2**20


def pod(gpu, nodes, link=450 * GB, nic=50 * GB, devices=8, nics=0, network=None, late=4.5 * US):
    """Nodes of a GPU model with NVLink, and NICs."""
    inner, outer = (1.5 * US, 1 / link), (late, 1 / nic)
    return replace(two_level(nodes, devices, inner, outer, nics, network=network), gpu=gpu)


def a100(nodes, nics=0):
    return pod("a100", nodes, 300 * GB, 25 * GB, nics=nics)


def b200(nodes):
    return pod("b200", nodes, 900 * GB)


def flat(machine):
    return np.arange(machine.devices)[None]
