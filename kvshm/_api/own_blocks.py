"""What a caller has said about its own blocks: published, being loaded, or neither.

A block is never two of these at once; a call that would make it so is refused before anything is
done.  What is published is remembered here as well as in the slot table, so that it can be
published again in another epoch.  Pure, not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvshm._base.ids import BlockId
from kvshm._shm.layout import RecordKind, pack_records
from kvshm.errors import MisuseError

from .arguments import MAX_GROUPS, checked_keys, checked_start, listed, whole
from .contents import BlockContent

_PUBLISH = int(RecordKind.PUBLISH)
TAG_BYTES = 8


class OwnBlocks:
    """All blocks of one engine."""

    def __init__(self, num_blocks: int, scales: Sequence[int]) -> None:
        """``scales``: of each group, how many keys a block covers."""
        self.num_blocks = num_blocks
        self._scales = scales
        self.contents: dict[BlockId, BlockContent] = {}
        """Of the published blocks."""
        self.waiting: dict[BlockId, BlockContent] = {}
        """Those of them that the present epoch does not show yet."""
        self._places: dict[tuple[bytes, int], dict[BlockId, None]] = {}
        self._loading: set[BlockId] = set()
        self.undrained: set[BlockId] = set()
        """Retracted, and perhaps still being read."""

    def find(self, key: bytes, group: int) -> BlockId | None:
        """Return a published block with this key, or None."""
        return next(iter(self._places.get((key, group), ())), None)

    def check_group(self, group: int) -> None:
        """Raise MisuseError unless there is such a group."""
        if not 0 <= whole("group", group) < len(self._scales):
            raise MisuseError(f"there is no group {group}; join() got {len(self._scales)}")

    def find_run(self, keys: Iterable[bytes], group: int) -> list[BlockId]:
        """Return published blocks with these keys, before the first key that has none."""
        found = []
        for key in keys:
            if (block := self.find(key, group)) is None:
                break
            found.append(block)
        return found

    def check_exist(self, blocks: Iterable[int]) -> list[BlockId]:
        """Return the blocks as a list.  Raises MisuseError for one that does not exist."""
        found = [whole("a block", block) for block in listed("blocks", blocks)]
        for block in found:
            if not 0 <= block < self.num_blocks:
                raise MisuseError(
                    f"block {block} does not exist: the regions have blocks 0 to "
                    f"{self.num_blocks - 1}"
                )
        return [BlockId(block) for block in found]

    def check_targets(self, blocks: Iterable[int], wanted: int) -> list[BlockId]:
        """Return the blocks that a load may fill, ``wanted`` in number.  Raises MisuseError."""
        targets = self.check_exist(blocks)
        if len(targets) != wanted:
            raise MisuseError(
                f"{len(targets)} blocks are given to load {wanted} into; give one for each, or "
                "look fewer keys up"
            )
        if len(set(targets)) != len(targets):
            raise MisuseError("a block is given twice to load into; give each once")
        for block in targets:
            self._check_free(block, "loaded into")
        return targets

    def check_contents(
        self, keys: Sequence[bytes], blocks: Iterable[int], start: int, group: int
    ) -> dict[BlockId, BlockContent]:
        """Return what those blocks hold that are not published yet.  ``start``: index of the first
        block in its prefix.  Raises MisuseError."""
        keys, given = listed("keys", keys), self.check_exist(blocks)
        self.check_group(group)
        if len(set(given)) != len(given):
            raise MisuseError("a block is given twice to publish; give each once")
        scale = self._scales[group]
        first = checked_start(start, len(keys) // scale)
        if first + len(given) != len(keys) // scale:
            raise MisuseError(
                f"{len(given)} blocks from block {first} on are not those of {len(keys)} keys; "
                "give the keys up to the last block's, and as `start` the index of the first block"
            )
        checked_keys(keys[max(0, first * scale - 1) :])  # the others are not used
        new: dict[BlockId, BlockContent] = {}
        for index, block in enumerate(given, first):
            parent = keys[index * scale - 1][:TAG_BYTES] if index else bytes(TAG_BYTES)
            content = BlockContent(keys[(index + 1) * scale - 1], parent, index, group)
            known = self.contents.get(block)
            if known is None:
                self._check_free(block, "published")
                new[block] = content
            elif (known.key, known.group) != (content.key, group):
                raise MisuseError(
                    f"block {block} is published with another key; retract it before it gets new "
                    "contents"
                )
        return new

    def check_separate(
        self, contents: Iterable[BlockContent], blocks: Iterable[int]
    ) -> dict[BlockId, BlockContent]:
        """Return what single blocks hold, all of which are free.  Raises MisuseError."""
        stated, given = listed("contents", contents), self.check_exist(blocks)
        if len(stated) != len(given) or len(set(given)) != len(given):
            raise MisuseError(
                f"{len(stated)} contents for {len(given)} blocks; give each block its own, once"
            )
        checked_keys([content.key for content in stated])
        for block, content in zip(given, stated, strict=True):
            self._check_free(block, "published")
            known = 0 <= content.group < MAX_GROUPS and 0 <= content.depth < 1 << 32
            if not known or len(content.parent) != TAG_BYTES:
                raise MisuseError(f"{content} cannot be; give what lookup_blocks() found")
        return dict(zip(given, stated, strict=True))

    def _check_free(self, block: BlockId, what: str) -> None:
        if block in self._loading:
            raise MisuseError(f"block {block} is being loaded and cannot be {what}; wait for that")
        if block in self.contents:
            raise MisuseError(f"block {block} is published and cannot be {what}; retract it first")
        if block in self.undrained and what == "published":
            raise MisuseError(
                f"block {block} was retracted without waiting and may have been written while it "
                "was read; call drain() before you write it"
            )

    def add(self, contents: dict[BlockId, BlockContent]) -> None:
        """These blocks are published."""
        self.contents |= contents
        self.waiting |= contents
        for block, content in contents.items():
            self._places.setdefault((content.key, content.group), {})[block] = None

    def remove(self, blocks: Iterable[BlockId]) -> list[BlockId]:
        """Return which of these blocks were published; they no longer are."""
        gone = []
        for block in blocks:
            if (content := self.contents.pop(block, None)) is not None:
                self.waiting.pop(block, None)
                place = content.key, content.group
                del self._places[place][block]
                if not self._places[place]:
                    del self._places[place]
                gone.append(block)
        return gone

    def begin_epoch(self) -> None:
        """Another epoch has begun, and shows nothing yet."""
        self.waiting = dict(self.contents)

    def take_waiting(self) -> dict[BlockId, BlockContent]:
        """Return what is published and not shown yet: it is going to be."""
        taken, self.waiting = self.waiting, {}
        return taken

    def begin_load(self, blocks: Iterable[BlockId]) -> None:
        """These blocks are being filled."""
        self._loading.update(blocks)

    def end_load(self, blocks: Iterable[BlockId]) -> None:
        """Nothing fills these blocks any more: they are the caller's."""
        self._loading.difference_update(blocks)

    def check_retractable(self, blocks: Iterable[int]) -> list[BlockId]:
        """Return the blocks.  Raises MisuseError for one that is being loaded."""
        given = self.check_exist(blocks)
        for block in given:
            if block in self._loading:
                raise MisuseError(
                    f"block {block} is being loaded; cancel the load and wait for its end"
                )
        return given

    def clear(self) -> None:
        """Nothing is published any more."""
        self.contents.clear()
        self.waiting.clear()
        self._places.clear()
        self.undrained.clear()


def pack_contents(contents: Mapping[BlockId, BlockContent]) -> tuple[bytes, bytes]:
    """Return the blocks' records, without generations, and their parents, as the slot table takes
    them."""
    records = pack_records(
        (content.key, block, 0, content.depth, _PUBLISH, content.group)
        for block, content in contents.items()
    )
    return records, b"".join(content.parent for content in contents.values())
