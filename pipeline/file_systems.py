"""What kind of file system a folder is on, and whether it takes what is written."""

import errno
import fcntl
import re
import uuid
from pathlib import Path

from dali.errors import InputError

# SQLite's locks do not hold between hosts on these, and its file may be damaged.
NETWORK = frozenset("nfs nfs4 cifs smb3 smbfs lustre ceph glusterfs beegfs gpfs afs 9p orangefs".split())


def network_file_system(path: Path, mounts: str | None = None) -> str | None:
    """The type (`nfs4`, ...) if the existing `path` is on a network file system, else None.

    `mounts` is the text of /proc/self/mountinfo, by default this process's.
    """
    text = mounts if mounts is not None else Path("/proc/self/mountinfo").read_text()
    best, kind = "", ""
    for line in text.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if path.resolve().is_relative_to(point) and len(point) >= len(
            best
        ):  # of equal ones the later hides the earlier
            best, kind = point, after.split()[0]
    # FUSE file systems say what they are behind a dot: fuse.sshfs, fuse.glusterfs
    return kind if kind in NETWORK or kind.startswith("fuse.") else None


def lock(descriptor: int, wait: bool) -> OSError | None:
    """Lock an open file for this process; returns why where its file system has no locks (Lustre mounted without them).

    Raises:
        BlockingIOError: another process has it, and we do not `wait`.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise
        return error
    return None


def check_output(output: Path) -> None:
    """Create the output folder and write to it.

    Raises:
        InputError: the folder cannot be made or written.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        probe = output / f".probe-{uuid.uuid4().hex}"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise InputError(f"output: {output} cannot be written ({error.strerror}); write output=FOLDER") from None
