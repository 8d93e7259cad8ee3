"""Folders of checkpoints: whenever a save is killed, the one before it is there, or the new one, never a mixture."""

import errno
import itertools
import os
import signal
import sys
import zlib
from pathlib import Path

import pytest

from fastpipe import latest_checkpoint
from fastpipe.checkpoint_folder import METADATA, Save, check_contents, check_files, check_target, locate

FILES = ["rank0_0.distcp", "rank1_0.distcp", METADATA]


def save(target: Path, step: int, keep: int | None = None) -> None:
    """Files whose content is the step, as ranks would write them."""
    one = Save(target)
    content = f"step {step}".encode()
    for name in FILES:
        (one.folder / name).write_bytes(content)
    one.complete(step, 2, {name: (len(content), zlib.crc32(content)) for name in FILES}, keep)


def step_in(path: Path | None) -> int:
    """The step of a checkpoint, all of whose files are of it."""
    assert path is not None
    manifest = check_files(path)
    assert manifest is not None
    check_contents(path, manifest.files)
    assert {(path / name).read_text() for name in FILES} == {f"step {manifest.step}"}
    return manifest.step


def killed_at(number: int, target: Path, step: int, keep: int | None) -> bool:
    """Whether a process was killed at so many of what it asks of the file system while it saves."""
    child = os.fork()
    if child == 0:
        asked = itertools.count()

        def die(event: str, _: object) -> None:
            if event.startswith(("os.", "open", "fcntl.")) and next(asked) == number:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(die)
        try:
            save(target, step, keep)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(("targets", "keep"), [(["a", "a"], None), (["a", "b"], 1), (["a", "b", "a"], 2)])
def test_killed_at_every_instant(targets: list[str], keep: int | None, tmp_path: Path) -> None:
    last = targets[-1]
    states = set()
    for number in itertools.count():
        folder = tmp_path / str(number)
        for step, name in enumerate(targets[:-1]):
            save(folder / name, step)
        before = len(targets) - 2
        if not killed_at(number, folder / last, before + 1, keep):
            break
        newest = step_in(latest_checkpoint(folder))
        states.add(newest)
        assert newest in (before, before + 1)
        if last in targets[:-1]:
            assert step_in(locate(folder / last)) in (targets.index(last), before + 1)
        save(folder / last, before + 2, keep)
        assert step_in(latest_checkpoint(folder)) == step_in(folder / last) == before + 2
        # killed at the very last, a checkpoint that was not to be kept is an empty folder
        left = {path.name for path in folder.iterdir() if any(path.iterdir())}
        assert left == ({last} if keep == 1 else set(targets))
    assert number > 15 and states == {before, before + 1}


def test_a_path_to_which_another_process_saves_is_refused(tmp_path: Path) -> None:
    """By another process, as locks are a process's."""
    save(tmp_path / "a", 1)
    running = Save(tmp_path / "a")
    child = os.fork()
    if child == 0:
        try:
            Save(tmp_path / "a")
        except RuntimeError as error:
            os._exit("another process is saving to this path: give each job a folder" not in str(error))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert running.folder.is_dir()
    running.discard()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_newest_was_saved_last_whatever_the_clock_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert latest_checkpoint(tmp_path) is None and latest_checkpoint(tmp_path / "none") is None
    (tmp_path / "other").mkdir()
    for clock in (5, 3, 4):
        monkeypatch.setattr("time.time_ns", lambda clock=clock: clock)
        save(tmp_path / f"step{clock}", clock)
    assert latest_checkpoint(str(tmp_path)) == tmp_path / "step4"


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        FileExistsError, match=r"path = '.*file/step1': its parent folder cannot be written: File exists"
    ):
        Save(tmp_path / "file" / "step1")

    def refuse(path: Path, *_: object, **__: object) -> None:
        if path.name.endswith(".saving"):  # as the tests may run as root, who may write everywhere
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError, match=r"path = '.*/step1': its parent folder cannot be written: Permission"):
        Save(tmp_path / "step1")


def test_names_of_other_checkpoints_are_theirs(tmp_path: Path) -> None:
    """A killed save of ``a.b`` is not one of ``a``."""
    other = Save(tmp_path / "a.b")
    other._lock._file.close()  # as if its process had ended
    save(tmp_path / "a", 1)
    assert other.folder.is_dir()
    save(tmp_path / "a.b", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.b"]


def test_a_manifest_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "saved" / "manifest.json").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"manifest\.json is a folder: the checkpoint is damaged; load another one"):
        check_files(tmp_path / "saved")
    assert latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize("path", [None, 3, b"saved", ""])
def test_what_is_no_path(path: object) -> None:
    for name, call in (("path", locate), ("path", check_target), ("folder", latest_checkpoint)):
        with pytest.raises(TypeError, match=rf"^{name} = {path!r}: give the name of a folder, a str or a Path"):
            call(path)  # type: ignore[operator]
