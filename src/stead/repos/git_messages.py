"""Git's own messages, where neither an exit code nor a porcelain format tells two failures apart.

Git runs with LC_ALL=C.UTF-8, so that they are not translated.
"""

import re
from enum import Enum


class GitMessage(Enum):
    DISK_FULL = "No space left on device|Disk quota exceeded|Out of diskspace"
    OUT_OF_MEMORY = "(?i:out of memory|cannot allocate memory|attempting to allocate)"
    ALLOCATION_LIMIT = "attempting to allocate"
    REF_MOVED = "but expected|reference already exists|unable to resolve reference|File exists"
    """A lost race on a ref."""
    REF_LOCKED = "cannot lock ref"
    NAME_CONFLICT = "; cannot create|in the way|blocking reference"
    """`a` and `a/b` cannot both be branches."""
    NOT_ADVERTISED = "unadvertised object"
    REF_NOT_FOUND = "not our ref|couldn't find remote ref"
    FSCK_FAILED = "fsck error"
    REMOTE_REF_MOVED = "non-fast-forward|fetch first|stale info|already exists|needs force"
    """The reason of a rejected push: the ref changed on the remote meanwhile."""
    BITMAP_RACE = "could not write multi-pack bitmap"
    """A push moved a ref to a commit outside of the packs that are being indexed."""
    JIT_STACK_EXHAUSTED = "error code -46"
    MATCH_LIMIT = "(?s:pcre2.*error code)"

    def found_in(self, text: str) -> bool:
        return re.search(self.value, text) is not None
