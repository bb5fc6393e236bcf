"""The base of proposers that draft with a network. A new one gives the network, and refuses what it
cannot draft.
"""

from abc import abstractmethod

from draftsmith.decode.compiled.steps import StaticSteps
from draftsmith.decode.propose.changed_logits import changed_network
from draftsmith.decode.propose.dynamic_tree import DynamicTreeSession
from draftsmith.decode.propose.network import Network
from draftsmith.decode.propose.protocol import Proposer, SessionSetup
from draftsmith.decode.propose.static_tree import DraftingPlan, StaticTreeSession
from draftsmith.decode.tree import Drawing, DynamicTree, TreeShape


class NetworkProposer(Proposer):
    """Drafts static and growing trees level by level with the network that `network` makes."""

    def __init__(self) -> None:
        self.steps: list[StaticSteps] = []

    @abstractmethod
    def network(self, setup: SessionSetup) -> Network:
        """The network over the prompts of one `generate` call."""

    def drawings(self, tree: TreeShape) -> frozenset[Drawing]:
        """Return all methods for one draft. With several, only independent draws give each sibling
        its own distribution.
        """
        if tree.grows:
            return frozenset({"deterministic"})
        if self.drafts > 1:
            return frozenset({"with_replacement"})
        return frozenset(
            {"without_replacement", "with_replacement", "top_and_one", "deterministic"}
        )

    def start(self, setup: SessionSetup) -> StaticTreeSession | DynamicTreeSession:
        network = changed_network(self.network(setup), setup)
        if isinstance(setup.tree, DynamicTree):
            return DynamicTreeSession(network, setup.tree, setup.sampling, setup.device)
        plan = DraftingPlan.build(setup.tree, network.device, setup.device)
        return StaticTreeSession(network, plan, setup.drawing, setup.sampling, bool(setup.compile))


def slots_per_step(tree: TreeShape) -> int:
    """Cache slots that one step needs behind the text: pending tokens and every node that may be
    expanded.
    """
    if isinstance(tree, DynamicTree):
        return tree.depth + 2 + max(tree.nodes, tree.beam * (tree.depth - 1))
    return tree.depth + 2 + tree.size
