"""Pods of GPUs that are not there: targets as data, meshes to compile for, XLA's flags."""

from collc.receipts.pods.mesh import Pod as Pod
from collc.receipts.pods.mesh import describe as describe
from collc.receipts.pods.mesh import parse_pod as parse_pod
from collc.receipts.pods.mesh import pod as pod
