"""WebDataset shards: uncompressed tar files whose members are read in any order, through a memory map and an index."""

import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali import cache
from dali.errors import InputError
from dali.interface import SUFFIXES, EncodedSource, Report, number_labels, silent

VERSION = 1
BLOCK = 512  # bytes; a member's header takes one, its content starts at a multiple
REPORT_EVERY = 2_000


class Index(NamedTuple):
    """The images of a shard in its order: member names, where their bytes are, labels, members that are no images."""

    names: list[bytes]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    labels: list[str] | None
    ignored: int


class _Member(NamedTuple):
    name: str
    offset: int
    length: int


class ShardSource(EncodedSource):
    """The samples of one or several shards, in order. A sample's members share their name up to its first dot.

    Its image is the first member with an image suffix; its label the text of `.cls`, or of "label" in `.json`: a whole
    number or a name. The digest covers member names, sizes and labels.
    """

    def __init__(self, path: str | Path, key: str = "data.path", report: Report = silent) -> None:
        """`path` is a shard or a folder of shards (*.tar, in byte order); `key` the config key to name in errors.

        Raises:
            InputError: no shard there, one that cannot be read, or samples with and without labels.
        """
        root = Path(path).expanduser().absolute()
        self._shards = shards_in(root) if root.is_dir() else [root]
        if not self._shards:
            raise InputError(f"{key}: {path} holds no shards (*.tar); give a shard, or a folder with some")
        indices = []
        for number, shard in enumerate(self._shards):
            indices.append(open_index(shard, key, report))
            if len(self._shards) > 1:
                report(f"opening shards of {path}", number + 1, len(self._shards))
        self._maps: dict[int, NDArray[np.uint8]] = {}
        self._owners = np.repeat(np.arange(len(indices)), [len(index.names) for index in indices])
        self._members = [name for index in indices for name in index.names]
        if not self._members:
            raise InputError(f"{key}: {path} holds no images; members need image suffixes, for example 0001.jpg")
        self._offsets = np.concatenate([index.offsets for index in indices])
        self._lengths = np.concatenate([index.lengths for index in indices])
        self.ignored = sum(index.ignored for index in indices)
        labelled = {index.labels is not None for index in indices if index.names}
        if len(labelled) == 2:
            raise InputError(
                f"{key}: {path}: some shards have labels and others have none; give all samples one, or none"
            )
        labels = [label for index in indices for label in index.labels or []]
        if labels:
            self.labels, self.classes = number_labels(labels)
        facts = [[os.fsdecode(name) for name in self._members], self._lengths.tolist(), labels]
        self.digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()

    def name(self, index: int) -> str:
        return f"{self._shards[self._owners[index]].name}/{os.fsdecode(self._members[index])}"

    def read(self, index: int) -> NDArray[np.uint8]:
        owner = int(self._owners[index])
        if owner not in self._maps:
            self._maps[owner] = np.memmap(self._shards[owner], np.uint8, mode="r")
        start = self._offsets[index]
        # A plain array: a memmap's slices are slow to make
        return np.asarray(self._maps[owner][start : start + self._lengths[index]])


def shards_in(folder: Path) -> list[Path]:
    """The shards directly in a folder, in the byte order of their names."""
    found = [file for file in folder.glob("*.tar") if not file.name.startswith(".")]
    return sorted(found, key=lambda file: os.fsencode(file.name))


def open_index(shard: Path, key: str, report: Report = silent) -> Index:
    """The index of a shard: the one kept for this size and time of change, or DALI's own (NAME.idx), or a new one.

    A new one is kept beside the shard, or in the cache folder where that cannot be written.

    Raises:
        InputError: the shard cannot be read, is compressed, or DALI's index is not its own.
    """
    try:
        status = shard.stat()
        stamp = {"version": VERSION, "bytes": status.st_size, "changed": status.st_mtime_ns}
        places = [
            shard.with_name(f".{shard.name}.index.npz"),
            cache.cache_folder() / f"shard-{hashlib.sha256(os.fsencode(shard)).hexdigest()[:32]}.npz",
        ]
        for place in places:
            if (kept := cache.load(place, *Index._fields, **stamp)) is not None:
                return _unpacked(kept)
        foreign = shard.with_name(shard.name.partition(".")[0] + ".idx")  # as wds2idx names it
        members = _dali_members(shard, foreign, key) if foreign.is_file() else _members(shard, key, report)
        with shard.open("rb") as stream:
            index = _grouped(members, stream, shard, key)
    except OSError as error:
        raise InputError(f"{key}: {shard}: {error.strerror or error}; give shards that can be read") from None
    cache.store(places, stamp | _packed(index))
    return index


def _packed(index: Index) -> dict[str, Any]:
    labels = json.dumps(index.labels).encode()
    return {
        "names": cache.pack(index.names),
        "offsets": index.offsets,
        "lengths": index.lengths,
        "labels": np.frombuffer(labels, np.uint8),
        "ignored": index.ignored,
    }


def _unpacked(kept: dict[str, NDArray[Any]]) -> Index:
    names = cache.unpack(kept["names"], len(kept["offsets"]))
    labels = json.loads(kept["labels"].tobytes())
    return Index(names, kept["offsets"], kept["lengths"], labels, int(kept["ignored"]))


def _members(shard: Path, key: str, report: Report) -> list[_Member]:
    """Every file in a tar, in its order."""
    members: list[_Member] = []
    total = shard.stat().st_size
    try:
        with tarfile.open(shard, "r:") as tar:
            while (found := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined]  # it would keep them all
                if found.issparse() or found.islnk():
                    raise InputError(
                        f"{key}: {shard}: {found.name} is a link or has holes; make the shard with tar "
                        "--hard-dereference and without --sparse"
                    )
                if found.isreg():
                    members.append(_Member(found.name, found.offset_data, found.size))
                    if len(members) % REPORT_EVERY == 0:
                        report(f"indexing {shard} (MB)", found.offset_data >> 20, total >> 20)
    except tarfile.ReadError as error:
        raise InputError(
            f"{key}: {shard}: is no uncompressed tar file, or is cut ({error}); write shards without compression"
        ) from None
    for member in members[-1:]:
        if member.offset + member.length > total:
            raise InputError(f"{key}: {shard}: is cut within {member.name}; get the shard again")
    return members


def _dali_members(shard: Path, file: Path, key: str) -> list[_Member]:
    """The members that DALI's index (wds2idx, v1.1 and v1.2) names, each checked against its header in the tar."""
    wrong = InputError(f"{key}: {file}: is not DALI's index of {shard.name}; make it again with wds2idx, or delete it")
    lines = file.read_bytes().decode(errors="surrogateescape").split("\n")
    version = lines[0].split(" ")[0]
    width = {"v1.1": 3, "v1.2": 4}.get(version)
    if width is None:
        raise wrong
    members = []
    with shard.open("rb") as stream:
        for line in lines[1:]:
            words = line.split(" ") if line else []
            if len(words) % width:
                raise wrong  # v1.2 with blanks in names: cannot be told apart
            for place in range(0, len(words), width):
                extension, offset, length, *name = words[place : place + width]
                if not offset.isdigit() or not length.isdigit():
                    raise wrong
                stream.seek(int(offset) - BLOCK)
                try:
                    header = tarfile.TarInfo.frombuf(stream.read(BLOCK), "utf-8", "surrogateescape")
                except tarfile.HeaderError:
                    raise wrong from None
                full = name[0] if name else header.name
                # A long or odd name stands in a header of its own, before this one
                plain = header.name.isascii() and "?" not in header.name and len(header.name) < 100
                if (
                    header.size != int(length)
                    or not full.endswith(extension)
                    or (full != header.name if plain else not name)
                ):
                    raise wrong
                members.append(_Member(full, int(offset), int(length)))
    return members


def _grouped(members: list[_Member], stream: Any, shard: Path, key: str) -> Index:
    """Images and labels of neighbouring members that share their name up to its first dot."""
    images: list[_Member] = []
    labels: list[str | None] = []
    ignored, current, last, label = 0, None, "", None

    def close() -> None:
        nonlocal ignored
        if current is not None:
            images.append(current)
            labels.append(label)
        elif label is not None:
            ignored += 1

    for member in members:
        folder, _, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        extension = extension.lower()
        if not stem:  # hidden
            ignored += 1
            continue
        if (sample := f"{folder}/{stem}") != last:
            close()
            last, current, label = sample, None, None
        if f".{extension}" in SUFFIXES and current is None:
            current = member
        elif extension == "cls" or (extension == "json" and label is None):
            stream.seek(member.offset)
            label = _label(stream.read(member.length), extension, f"{key}: {shard}: {member.name}") or label
        else:
            ignored += 1
    close()
    known = [label for label in labels if label is not None]
    if known and len(known) < len(labels):
        stray = images[labels.index(None)].name
        raise InputError(f"{key}: {shard}: {stray} has no label, other samples have; give all samples one, or none")
    return Index(
        [os.fsencode(image.name) for image in images],
        np.array([image.offset for image in images], np.int64),
        np.array([image.length for image in images], np.int64),
        known or None,
        ignored,
    )


def _label(content: bytes, extension: str, place: str) -> str | None:
    """The text of a .cls; "label" of a .json, None if it has none."""
    if extension == "cls":
        text = content.decode(errors="replace").strip()
        if not text:
            raise InputError(f"{place}: is empty; a .cls holds the class")
        return text
    try:
        found = json.loads(content)
    except ValueError:
        raise InputError(f"{place}: is not JSON") from None
    label = found.get("label") if isinstance(found, dict) else None
    if isinstance(label, bool) or not isinstance(label, int | str | None):
        raise InputError(f"{place}: the label {label!r} is no whole number and no name")
    return None if label is None else str(label)
