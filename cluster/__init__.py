"""Ranks on several machines: nodes, their leases, their links, and the engines that start them."""

from __future__ import annotations

from .driver.events import EngineGone as EngineGone
from .driver.events import NodeAwaited as NodeAwaited
from .driver.events import NodeFenced as NodeFenced
from .driver.events import NodeJoined as NodeJoined
from .driver.events import NodeLost as NodeLost
from .driver.events import NodeQuarantined as NodeQuarantined
from .driver.events import NodeRecovered as NodeRecovered
from .driver.events import NodeSuspect as NodeSuspect
from .driver.node_pool import NodePool as NodePool
from .driver.node_pool import Reservation as Reservation
from .driver.options import ClusterOptions as ClusterOptions
from .driver.remote_process import RemoteProcess as RemoteProcess
from .join.options import JoinedNodes as JoinedNodes
from .link.handshake import version_mismatches as version_mismatches
from .link.messages import Output as Output
from .link.messages import RankLaunch as RankLaunch
from .link.messages import RelayLink as RelayLink
from .ray.options import Ray as Ray
from .ray.options import check_ray_installed as check_ray_installed
