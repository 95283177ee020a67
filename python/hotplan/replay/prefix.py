"""The prefix cache: a tree of prompt blocks, shared by reference, the longest unused evicted first.

A node is one block of 512 prompt tokens below the blocks before it. The cache holds the node's full pages, and the
state of those pages at its end that a request continuing from there still has in its window. State is scarcer than
slots, so it is evicted on its own; a block without state is no place to continue from, though longer prefixes may run
through it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from hotplan.replay.pool import SlotPool, check
from hotplan.replay.trace import BLOCK_TOKENS


class Node:
    """One cached block; `users` counts the running requests whose prompt goes through it."""

    __slots__ = ("children", "has_state", "key", "pages", "parent", "users")

    def __init__(self, parent: Node | None, key: int, pages: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[int, Node] = {}
        self.users = 0
        self.has_state = False


class PrefixCache:
    """Blocks by their chain of hash ids. `window` is the sliding window in tokens."""

    def __init__(self, pool: SlotPool, page_size: int, window: int) -> None:
        self._pool = pool
        self._window_blocks = -(-window // BLOCK_TOKENS)
        self._block_pages = BLOCK_TOKENS // page_size
        self._tail = min(self._block_pages, -(-window // page_size))  # pages of a block whose state is worth keeping
        self._root = Node(None, -1, [])
        # Oldest first. A request lets go of its last block first, so a child is always before its parent.
        self._unused: OrderedDict[Node, None] = OrderedDict()
        self._with_state: OrderedDict[Node, None] = OrderedDict()
        self.evicted_blocks = 0
        self.evicted_states = 0

    @property
    def evictable_pages(self) -> int:
        return len(self._unused) * self._block_pages

    def match(self, hash_ids: Sequence[int], most: int) -> list[Node]:
        """The longest cached prefix of at most `most` blocks that a request can continue from."""
        nodes: list[Node] = []
        node = self._root
        for key in hash_ids[:most]:
            child = node.children.get(key)
            if child is None:
                break
            nodes.append(child)
            node = child
        while nodes and not self._continues(nodes):
            nodes.pop()
        return nodes

    def _continues(self, nodes: Sequence[Node]) -> bool:
        """Whether all tokens in the window before the end of the last node have their state."""
        return all(node.has_state for node in nodes[-self._window_blocks :])

    def use(self, node: Node) -> None:
        node.users += 1
        self._unused.pop(node, None)
        if node.has_state:
            self._with_state.move_to_end(node)

    def unuse(self, node: Node) -> None:
        node.users -= 1
        check(node.users >= 0, "a cached block is let go twice")
        if node.users == 0:
            self._unused[node] = None

    def insert(self, parent: Node | None, key: int, pages: Sequence[int]) -> Node:
        """The node of a block that a request has just computed into `pages`, whose tail state must be alive.

        Where the block is cached already, that node is returned and the request's pages stay its own; if the node had
        lost its state, it takes over the new pages instead of the old ones.
        """
        parent = parent or self._root
        node = parent.children.get(key)
        if node is None:
            node = parent.children[key] = Node(parent, key, list(pages))
            self._unused[node] = None
        elif node.has_state:
            return node
        else:
            old, node.pages = node.pages, list(pages)
            for page in old:
                self._pool.drop(page)
        for page in node.pages:
            self._pool.hold(page)
        for page in node.pages[-self._tail :]:
            self._pool.hold_state(page)
        node.has_state = True
        self._with_state[node] = None
        return node

    def _forget_state(self, node: Node) -> None:
        node.has_state = False
        del self._with_state[node]
        for page in node.pages[-self._tail :]:
            self._pool.drop_state(page)

    def _evict_block(self) -> None:
        node, _ = self._unused.popitem(last=False)
        parent = node.parent
        check(not node.children and parent is not None, "a cached block is evicted before its continuation")
        if node.has_state:
            self._forget_state(node)
        for page in node.pages:
            self._pool.drop(page)
        assert parent is not None  # checked above
        del parent.children[node.key]

    def make_room(self, full_pages: int, state_pages: int) -> bool:
        """Evicts until both pools have so many free pages; False where that cannot be reached."""
        if self._pool.full.free + self.evictable_pages < full_pages:
            return False
        while self._pool.full.free < full_pages:
            self._evict_block()
            self.evicted_blocks += 1
        if self._pool.state.free < state_pages:
            for node in list(self._with_state):
                # State in a running window stays alive whatever the cache does: dropping it here would free nothing.
                if all(self._pool.state_holders(page) == 1 for page in node.pages[-self._tail :]):
                    self._forget_state(node)
                    self.evicted_states += 1
                    if self._pool.state.free >= state_pages:
                        break
        return self._pool.state.free >= state_pages

    def clear(self) -> None:
        """Evicts every block that no request uses."""
        while self._unused:
            self._evict_block()

    def nodes(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def held(self) -> tuple[list[int], list[int]]:
        """Full pages and pages with state that the cache holds, for `SlotPool.audit`."""
        full: list[int] = []
        state: list[int] = []
        for node in self.nodes():
            full += node.pages
            if node.has_state:
                state += node.pages[-self._tail :]
        return full, state
