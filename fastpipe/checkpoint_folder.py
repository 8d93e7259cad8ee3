"""The folder of a checkpoint: complete or absent at every instant, with the size and the checksum of each file.

A save writes into ``.<name>.<token>.saving`` next to its target. When every process has synced its files, one of them

1. writes the manifest and syncs it,
2. renames an existing target to ``.<name>.replaced``,
3. renames the new folder to the target, and
4. removes the replaced one.

If killed before step 2 or after step 3, the target is complete; in between, `locate` returns the replaced one. A save
holds a lock on the file ``.<name>.lock``: another process cannot save to the same target meanwhile, and the next save
removes the folders of killed ones. Only files of checkpoints are deleted.

The files are those of ``torch.distributed.checkpoint``, but this module does not need torch.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import time
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastpipe.checks import as_path

MANIFEST = "manifest.json"
METADATA = ".metadata"
FILE_PREFIX = "rank{}_"
"""Of the data files of a rank. Those of a save without a manifest begin with ``__`` instead."""

_OWN = re.compile(r"(rank|__)\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json")
_UNPROVED = re.compile(r"__\d+_\d+\.distcp")
_SAVING = re.compile(r"\.(.+)\.[0-9a-f]{8}\.saving")
_REPLACED = re.compile(r"\.(.+)\.replaced")
_CHUNK = 1 << 20

logger = logging.getLogger("fastpipe")


@dataclass(frozen=True)
class Manifest:
    """The content of a save.

    Attributes:
        saved: nanoseconds since the epoch; later than every older checkpoint in the same folder.
        step: the pipeline's step count.
        ranks: the number of processes that wrote it.
        files: the size and CRC-32 of each file, by name.
    """

    saved: int
    step: int
    ranks: int
    files: Mapping[str, tuple[int, int]]

    def to_json(self) -> str:
        """JSON text with a checksum of its own."""
        content = asdict(self)
        return json.dumps({**content, "crc32": _content_crc(content)}, indent=1)

    @classmethod
    def of(cls, folder: Path) -> Manifest | None:
        """Read the manifest of a folder; None if there is none.

        Raises:
            ValueError: if it was altered.
        """
        try:
            text = (folder / MANIFEST).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except IsADirectoryError:
            raise damaged(folder, MANIFEST, "is a folder") from None
        try:
            content = json.loads(text)
            if content.pop("crc32") == _content_crc(content):
                return cls(**{**content, "files": {name: tuple(entry) for name, entry in content["files"].items()}})
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        raise damaged(folder, MANIFEST, "is not what was written")


def _content_crc(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def damaged(folder: Path, name: str, what: str) -> ValueError:
    """The error for a file that differs from what was saved."""
    return ValueError(
        f"{folder / name} {what}: the checkpoint is damaged; load another one; fastpipe.latest_checkpoint "
        f"returns it when {folder} is removed"
    )


def real_path(path: str | os.PathLike[str]) -> Path:
    """The path of a folder without links."""
    return Path(os.path.realpath(as_path(path, what="folder")))


def locate(path: str | os.PathLike[str]) -> Path:
    """The folder of a checkpoint: its path, or the replaced one if a save into it was killed before completion."""
    target = real_path(path)
    replaced = _replaced(target)
    if not target.exists() and replaced.is_dir():
        logger.warning("a save of %s was killed before it was complete; the previous checkpoint is used", target)
        return replaced
    return target


def check_files(folder: Path) -> Manifest | None:
    """Check presence and size of every file; without a manifest, that no file is newer than the metadata.

    Returns:
        The manifest; None for a checkpoint without one (of DCP alone).

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        ValueError: for a file that is missing or has another size, and for files of different saves.
    """
    manifest = Manifest.of(folder)
    if manifest is None:
        _check_unproved(folder)
        return None
    for name, (size, _) in manifest.files.items():
        check_size(folder, name, size)
    return manifest


def check_size(folder: Path, name: str, size: int) -> None:
    """Raise ValueError unless a file exists with that size."""
    try:
        found = (folder / name).stat().st_size
    except FileNotFoundError:
        raise damaged(folder, name, "is missing") from None
    if found != size:
        raise damaged(folder, name, f"has {found} bytes, and had {size} when it was saved")


def check_contents(folder: Path, files: Mapping[str, tuple[int, int]], part: int = 0, parts: int = 1) -> None:
    """Verify the checksums of files: part number ``part`` of ``parts`` parts of about the same size.

    Raises:
        ValueError: naming a file that was altered.
    """
    buffer = memoryview(bytearray(_CHUNK))
    for name in sorted(files, key=lambda name: (-files[name][0], name))[part::parts]:
        crc = 0
        with open(folder / name, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                crc = zlib.crc32(buffer[:count], crc)
        if crc != files[name][1]:
            raise damaged(folder, name, "has been altered since it was saved, or is a file of another checkpoint")


def _check_unproved(folder: Path) -> None:
    """Check a folder without a manifest: DCP writes its metadata last."""
    if not (folder / METADATA).is_file():
        what = "this folder has no complete checkpoint" if folder.is_dir() else "there is no such folder"
        raise FileNotFoundError(f"path = {str(folder)!r}: {what}; give one that save_checkpoint has filled")
    written = (folder / METADATA).stat().st_mtime_ns
    for file in sorted(folder.glob("*.distcp")):
        if not _UNPROVED.fullmatch(file.name):
            raise damaged(folder, MANIFEST, "is missing")
        if file.stat().st_mtime_ns > written:
            raise ValueError(
                f"{file} is newer than {METADATA}, which is written last: a save into the same folder was killed, and "
                "files of two checkpoints are mixed; load another one. If files were copied without their times, "
                f"touch {folder / METADATA}"
            )


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, for `load_checkpoint`.

    Works in any process. It reads only names, sizes and manifests; `load_checkpoint` verifies the checksums. A
    checkpoint with a missing or truncated file is skipped, with a warning in the log.

    Args:
        folder: the parent of the paths given to `save_checkpoint`, such as ``folder / f"step{step}"``.

    Returns:
        The path of the checkpoint that was saved last; None if there is no checkpoint, or no such folder.
    """
    found: dict[Path, int] = {}
    for path in _places(as_path(folder, "folder", "folder")):
        try:
            manifest = check_files(path)
            found[path] = manifest.saved if manifest else (path / METADATA).stat().st_mtime_ns
        except FileNotFoundError:
            continue  # not a checkpoint, or removed since it was listed
        except (ValueError, OSError) as error:
            logger.warning("%s is skipped: %s", path, error)
    return max(found, key=lambda path: (found[path], path.name), default=None)


def _places(folder: Path) -> list[Path]:
    """Folders that may be checkpoints; excludes those of running and killed saves."""
    paths = [path for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    replaced = {path: match for path in paths if (match := _REPLACED.fullmatch(path.name))}
    left = {path for path, match in replaced.items() if not (folder / match[1]).exists()}
    return [path for path in paths if path in left or not (path in replaced or _SAVING.fullmatch(path.name))]


def check_target(path: str | os.PathLike[str]) -> None:
    """Check that a path can be saved to: it can be made, or has only files of a checkpoint."""
    target = real_path(path)
    found = next(folder for folder in (target, *target.parents) if folder.exists())
    if not found.is_dir():
        raise ValueError(f"path = {str(path)!r}: {str(found)!r} is a file; give a new folder")
    names = sorted(os.listdir(target)) if target.is_dir() else []
    foreign = [name for name in names if not _OWN.fullmatch(name)]
    if foreign:
        raise ValueError(
            f"path = {str(path)!r}: the folder has {foreign[0]!r}, which is not a file of a checkpoint, and a "
            "save replaces the whole folder; give a new one, in this folder for example"
        )


class Save:
    """One save, on the process that completes it.

    Args:
        target: the path of the checkpoint.

    Attributes:
        folder: the temporary folder that all processes write into.

    Raises:
        OSError: if it cannot be made, with the path of the checkpoint.
        RuntimeError: while another process saves to the same path.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            self._lock = _Lock(target)
            try:
                self._begin(target)
            except BaseException:  # raised again, without the lock
                self._lock.release()
                raise
        except OSError as error:
            text = f"path = {str(target)!r}: its parent folder cannot be written: {error.strerror}"
            raise OSError(error.errno, text, error.filename) from None

    def _begin(self, target: Path) -> None:
        for path in target.parent.iterdir() if self._lock.is_held else ():
            saving = _SAVING.fullmatch(path.name)
            if saving and saving[1] == target.name:
                _remove(path)
        self.folder = target.parent / f".{target.name}.{secrets.token_hex(4)}.saving"
        self.folder.mkdir()

    def complete(self, step: int, ranks: int, files: Mapping[str, tuple[int, int]], keep: int | None) -> None:
        """Rename the new folder to the target. All files are on disk.

        Args:
            step: for the manifest, like the next two.
            ranks: the number of processes that wrote.
            files: the files they wrote.
            keep: the number of checkpoints to keep in the parent folder, including this one; None for all.

        Raises:
            ValueError: if the target now has a file that is not a checkpoint's.
        """
        check_target(self._target)
        others = self._others()
        saved = max([time.time_ns(), *(other.saved + 1 for other in others.values())])
        with open(self.folder / MANIFEST, "w") as manifest:
            manifest.write(Manifest(saved, step, ranks, files).to_json())
            manifest.flush()
            os.fsync(manifest.fileno())
        sync_folder(self.folder)
        replaced = _replaced(self._target)
        if self._target.exists():
            _remove(replaced)
            os.rename(self._target, replaced)
        os.rename(self.folder, self._target)
        sync_folder(self._target.parent)
        _remove(replaced)
        if keep is not None:
            for path in _older(others, keep - 1):
                _remove(path)
        self._lock.release()

    def discard(self) -> None:
        """Remove the files of a failed save. The next save removes what other processes still write."""
        _remove(self.folder)
        self._lock.release()

    def _others(self) -> dict[Path, Manifest]:
        """The other checkpoints in the same folder that have a manifest, complete or not."""
        found = {}
        for path in _places(self._target.parent):
            try:
                skipped = path in (self._target, _replaced(self._target)) or path.is_symlink()
                manifest = None if skipped else Manifest.of(path)
            except (ValueError, OSError) as error:
                logger.warning("%s is skipped: %s", path, error)
                continue
            if manifest is not None:
                found[path] = manifest
        return found


def _older(checkpoints: Mapping[Path, Manifest], keep: int) -> list[Path]:
    """The checkpoints older than the ``keep`` newest complete ones."""
    kept = 0
    older = []
    for path in sorted(checkpoints, key=lambda path: checkpoints[path].saved, reverse=True):
        if kept == keep:
            older.append(path)
        else:
            kept += _is_complete(path)
    return older


def _is_complete(path: Path) -> bool:
    try:
        return check_files(path) is not None
    except (ValueError, OSError):
        return False


def _replaced(target: Path) -> Path:
    return target.parent / f".{target.name}.replaced"


def _remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest last, so that an interrupted removal can be resumed."""
    if not folder.is_dir():
        return
    try:
        names = sorted(os.listdir(folder), key=lambda name: name == MANIFEST)
        for name in names:
            if _OWN.fullmatch(name):
                (folder / name).unlink()
        folder.rmdir()
    except OSError as error:
        logger.warning("the old checkpoint %s was not removed: %s", folder, error)


class _Lock:
    """The lock of a target; ends with the process. Unlike with flock, forked processes do not hold it.

    Attributes:
        is_held: false on a file system without locks.

    Raises:
        RuntimeError: if another process holds it.
    """

    def __init__(self, target: Path) -> None:
        self._path = target.parent / f".{target.name}.lock"
        while True:
            self._file = open(self._path, "w")  # noqa: SIM115 - closed by `release`
            self.is_held = self._lock(target)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self._path)):
                    return
            self._file.close()  # the process that held it has removed it

    def _lock(self, target: Path) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                logger.debug("%s cannot be locked: %s", self._path, error)
                return False
            self._file.close()
            raise RuntimeError(
                f"path = {str(target)!r}: another process is saving to this path: give each job a folder of its own"
            ) from None
        return True

    def release(self) -> None:
        """Remove the file while it is locked, so that nobody locks one that is removed later."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def sync_folder(folder: Path) -> None:
    """Sync the names in a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
