"""The links of a machine, imported or discovered, as one directed weighted graph whose facts keep their sources."""

from costlab.app.topology.model import Topology, TopologyProblem

__all__ = ["Topology", "TopologyProblem"]
