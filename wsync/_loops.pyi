from wsync.loops.arena_writer import ArenaWriter as ArenaWriter
from wsync.loops.gate_state import GateState as GateState
from wsync.loops.installer import Installer as Installer
from wsync.loops.pack_plan import PackPlan as PackPlan
from wsync.loops.tensor_tree import TensorTree as TensorTree
from wsync.loops.worker_slot import WorkerSlot as WorkerSlot

REVISION: int

def configure(*arguments: object) -> None: ...
