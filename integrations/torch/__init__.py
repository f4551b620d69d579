"""Training through kills: the state of ranks that train with torch, kept exact across deaths.

The result of a run does not depend on which ranks died, nor when: docs/tutorials/training.md.
"""

from __future__ import annotations

from phalanx.supervision import require_package

require_package("torch", "torch")

from .buckets import fix_buckets as fix_buckets
from .buckets import replicate as replicate
from .errors import HiddenState as HiddenState
from .errors import NoRoom as NoRoom
from .errors import ShapeChanged as ShapeChanged
from .errors import StateLost as StateLost
from .errors import TrainingError as TrainingError
from .errors import WorldSizeChanged as WorldSizeChanged
from .errors import WrongDevice as WrongDevice
from .memory_checkpoint import MemoryCheckpoint as MemoryCheckpoint
from .sampling import sample_indices as sample_indices
from .sampling import seed_step as seed_step
from .sampling import step_seed as step_seed
from .state import State as State
from .trainer import Plan as Plan
from .trainer import Resumed as Resumed
from .trainer import Trainer as Trainer
from .training import Step as Step
from .training import Training as Training
