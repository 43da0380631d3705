"""Folders that hold parts: on a local disk, or anywhere that fsspec reaches.

Here is what it takes for a part to appear whole: locally, files are flushed to the
disk and renamed into place; on object storage, where a name appears when its upload is
over, the head of a part is uploaded last.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from circuitlab.errors import StoreError

HEAD = "part.json"
TEMPORARY = ".tmp-"
OBJECT_STORES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "r2")
STALE = 3600.0
"""Seconds after which what a dead writer left may be swept away."""

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
# No such folder and none can be made, as below /proc; or its name can't be one.
_NOWHERE = (errno.ENOENT, errno.ENAMETOOLONG, errno.ELOOP)


@contextlib.contextmanager
def os_errors(path: Path | str, writing: bool) -> Iterator[None]:
    """Turn the errors of the operating system into a StoreError with a remedy."""
    try:
        yield
    except OSError as error:
        found = _typed(error, str(path), writing)
        if found is None:
            raise
        raise found from error


def _typed(error: OSError, path: str, writing: bool) -> StoreError | None:
    reason = errno.errorcode.get(error.errno or 0, "")
    if error.errno in _FULL:
        return StoreError(
            "store_disk_full",
            f"no room to write {path}; nothing was saved, and what was is unharmed. "
            "Free some space and save again",
            path=path,
            reason=reason,
        )
    if error.errno in (*_DENIED, *_NOWHERE) and writing:
        return StoreError(
            "store_not_writable",
            f"{path} can't be written ({os.strerror(error.errno or 0)}); use another "
            "store (--store, CIRCUITLAB_STORE) or change its rights",
            path=path,
            reason=reason,
        )
    if error.errno in _DENIED:
        return StoreError(
            "store_not_readable",
            f"{path} can't be read ({os.strerror(error.errno or 0)}); change its rights",
            path=path,
            reason=reason,
        )
    if error.errno in (errno.ENOTDIR, errno.EEXIST) and writing:
        return StoreError(
            "store_path_invalid",
            f"{path}: a file stands where a folder is needed; choose another store",
            path=path,
            reason=reason,
        )
    return None


@dataclass(frozen=True)
class LocalFolder:
    """A folder on a disk of this machine, or one that it mounts."""

    root: Path
    slow: ClassVar[bool] = False

    @property
    def url(self) -> str:
        return str(self.root)

    def path(self, name: str) -> str:
        return str(self.root / name)

    def names(self) -> list[str]:
        with os_errors(self.root, writing=False):
            try:
                return [path.name for path in self.root.iterdir()]
            except FileNotFoundError:
                return []

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        found = {}
        for name in names:
            path = self.root / name
            gone = contextlib.suppress(FileNotFoundError)
            with os_errors(path, writing=False), gone:
                found[name] = path.read_bytes()
        return found

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = (self.root / name).stat().st_size
        return found

    def put(self, name: str, files: Mapping[str, bytes]) -> bool:
        target = self.root / name
        with os_errors(self.root, writing=True):
            if (target / HEAD).exists():
                return False
            self.root.mkdir(parents=True, exist_ok=True)
            made = self._temporary()
            try:
                made.mkdir()
                for file, content in files.items():
                    _write(made / file, content)
                _flush(made)
                there = not _renamed(made, target)
            finally:
                shutil.rmtree(made, ignore_errors=True)
            _flush(self.root)
        return not there

    def put_file(self, name: str, content: bytes) -> None:
        with os_errors(self.root, writing=True):
            self.root.mkdir(parents=True, exist_ok=True)
            made = self._temporary()
            try:
                _write(made, content)
                made.rename(self.root / name)
            finally:
                made.unlink(missing_ok=True)
            _flush(self.root)

    def drop(self, name: str) -> None:
        with os_errors(self.root, writing=True):
            gone = self._temporary()
            try:
                (self.root / name).rename(gone)
            except FileNotFoundError:
                return
            if gone.is_dir():
                shutil.rmtree(gone, ignore_errors=True)
            else:
                gone.unlink(missing_ok=True)

    def sweep(self) -> int:
        """Remove what writers left that died; how many entries."""
        old = time.time() - STALE
        swept = 0
        for name in self.names():
            path = self.root / name
            with contextlib.suppress(OSError):
                if name.startswith(TEMPORARY) and path.stat().st_mtime < old:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                    swept += 1
        return swept

    def _temporary(self) -> Path:
        return self.root / f"{TEMPORARY}{os.getpid()}-{uuid.uuid4().hex}"


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the names in a folder durable, where the platform knows how."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _renamed(made: Path, target: Path) -> bool:
    """Rename a folder into place; False if another writer was first."""
    try:
        made.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return False
        raise
    return True


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix on what an fsspec filesystem reaches. `root` is without protocol."""

    fs: Any = field(repr=False)
    root: str
    protocol: str
    slow: ClassVar[bool] = True

    @staticmethod
    def of(url: str) -> RemoteFolder:
        """Open a URL such as `s3://bucket/prefix`. Raises StoreError `remote_unknown`."""
        import fsspec
        from fsspec.core import url_to_fs

        protocol = url.partition("://")[0]
        try:
            fs, root = url_to_fs(url)
        except (ValueError, ImportError) as error:
            known = sorted(fsspec.available_protocols())
            raise StoreError(
                "remote_unknown",
                f"no filesystem for {protocol}://: {error}",
                value=url,
                expected=known,
            ) from error
        return RemoteFolder(fs, root.rstrip("/"), protocol)

    @property
    def url(self) -> str:
        return f"{self.protocol}://{self.root.lstrip('/')}"

    def path(self, name: str) -> str:
        return f"{self.protocol}://{self.root}/{name}"

    def names(self) -> list[str]:
        with self._errors():
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rpartition("/")[2] for path in found]

    def read(self, names: Iterable[str]) -> dict[str, bytes]:
        paths = {f"{self.root}/{name}": name for name in names}
        if not paths:
            return {}
        with self._errors():
            found = self.fs.cat(list(paths), on_error="return")
        bad = [e for e in found.values() if isinstance(e, Exception)]
        other = [e for e in bad if not isinstance(e, FileNotFoundError)]
        if other:
            raise self._unreachable(other[0]) from other[0]
        return {
            name: data
            for path, data in found.items()
            if isinstance(data, bytes) and (name := _name_in(paths, path))
        }

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        found = {}
        for name in names:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                found[name] = self.fs.size(f"{self.root}/{name}")
        return found

    def put(self, name: str, files: Mapping[str, bytes]) -> bool:
        with self._errors():
            if self.fs.exists(f"{self.root}/{name}/{HEAD}"):
                return False
            last_of_all = sorted(files, key=lambda file: file == HEAD)
            for file in last_of_all:
                self.put_file(f"{name}/{file}", files[file])
        return True

    def put_file(self, name: str, content: bytes) -> None:
        path = f"{self.root}/{name}"
        with self._errors():
            # Object stores need no folders, and would make a bucket of that name.
            if self.protocol not in OBJECT_STORES:
                self.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            try:
                self.fs.pipe_file(path, content)
            except FileNotFoundError as error:
                raise self._unreachable(error) from error

    def drop(self, name: str) -> None:
        with self._errors():
            head = f"{self.root}/{name}/{HEAD}"
            if self.fs.exists(head):
                # Without its head a part is no part.
                self.fs.rm(head)
            with contextlib.suppress(FileNotFoundError):
                self.fs.rm(f"{self.root}/{name}", recursive=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> StoreError:
        return StoreError(
            "remote_unreachable",
            f"{self.url}: {error or type(error).__name__}; check the address and the "
            "credentials that its filesystem uses",
            path=self.url,
            reason=type(error).__name__,
        )


def _name_in(paths: Mapping[str, str], path: str) -> str | None:
    return (
        paths.get(path)
        or paths.get("/" + path.lstrip("/"))
        or paths.get(path.lstrip("/"))
    )
