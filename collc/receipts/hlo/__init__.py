"""HLO text: read, and what its collectives are, how often they run, and beside what."""

from collc.receipts.hlo.collectives import CLASSES as CLASSES
from collc.receipts.hlo.collectives import KINDS as KINDS
from collc.receipts.hlo.collectives import AllGather as AllGather
from collc.receipts.hlo.collectives import AllReduce as AllReduce
from collc.receipts.hlo.collectives import AllToAll as AllToAll
from collc.receipts.hlo.collectives import Collective as Collective
from collc.receipts.hlo.collectives import CollectiveBroadcast as CollectiveBroadcast
from collc.receipts.hlo.collectives import CollectivePermute as CollectivePermute
from collc.receipts.hlo.collectives import RaggedAllToAll as RaggedAllToAll
from collc.receipts.hlo.collectives import ReduceScatter as ReduceScatter
from collc.receipts.hlo.collectives import Reducing as Reducing
from collc.receipts.hlo.collectives import count as count
from collc.receipts.hlo.module import Module as Module
from collc.receipts.hlo.module import parse as parse
from collc.receipts.hlo.module import parse_hlo as parse_hlo
