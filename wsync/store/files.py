"""The files in a store's folder, on any file system that ``fsspec`` has: each is seen when all of it is there.

On a local file system a file is written under another name, flushed to the disk and renamed. Object stores (S3, memory)
show an object when all of it is there. File systems that write in place and cannot be renamed on are refused.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from torch import Tensor

from wsync.errors import NotConnected
from wsync.weights import tensor_file

File = io.FileIO | io.BytesIO
"""A version's file, open for reading."""
_UNFINISHED = ".unfinished"
_IN_PLACE = {"ftp", "hdfs", "sftp", "smb", "webhdfs"}
"""File systems on which a file is seen while it is being written, and which ``fsspec`` cannot rename as a whole."""


def absolute_url(url: str | os.PathLike[str]) -> str:
    """Return a URL as it is, and a path from the root: workers may have other working directories.

    Raises:
        ValueError: it is empty.
    """
    url = os.fspath(url)
    if not url:
        raise ValueError("url is the URL or the path of a folder ('s3://bucket/run', '/shared/run'), not ''")
    path = re.sub(r"^(file|local)://", "", url)
    return path if "://" in path or "::" in path else os.path.abspath(os.path.expanduser(path))


class Folder:
    """The folder at a URL, and the files in it. Methods raise whatever the library of the file system raises.

    Args:
        url: as ``fsspec`` reads it: a path, ``s3://bucket/run/policy``, ``memory://policy``.
        durable: whether a file is flushed to the disk before it has its name (local file systems).

    Attributes:
        url: as given, for messages: without user, password and query.
        local: its path, if it is on a local file system.

    Raises:
        NotConnected: the file system cannot be opened.
    """

    def __init__(self, url: str, durable: bool) -> None:
        self.url = re.sub(r"(?<=://)[^/]*@|\?.*", "", url) if "://" in url else url
        self._given_url = url
        self._durable = durable
        try:
            opened, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # besides OSError: whatever the library of the file system raises
            raise NotConnected(f"the store {self.url} cannot be opened: {self.explain(error)}") from error
        self._protocols = {opened.protocol} if isinstance(opened.protocol, str) else {*opened.protocol}
        self.local = Path(self._root) if isinstance(opened, LocalFileSystem) else None

    @property
    def _fs(self) -> Any:
        """This thread's file system: ``fsspec`` keeps one for each."""
        return fsspec.core.url_to_fs(self._given_url)[0]

    def explain(self, error: Exception) -> str:
        """Return an error of a library as text, without user, password and query of the URLs in it."""
        text = f"{type(error).__name__}: {error}".replace(self._given_url, self.url)  # which may have a blank
        return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)

    def make(self) -> None:
        """Make the folder, and delete what a killed trainer left unfinished."""
        if refused := self._protocols & _IN_PLACE:
            raise OSError(f"{min(refused)}:// cannot replace a file as a whole: mount that file system")
        new = [] if self.local is None else [path for path in (self.local, *self.local.parents) if not path.exists()]
        self._fs.makedirs(self._root, exist_ok=True)
        for path in new if self._durable else ():
            _flush(path.parent)
        for name in self.names():
            if name.endswith(_UNFINISHED) or name.startswith(".tmp"):  # the latter by safetensors
                with suppress(FileNotFoundError):  # another trainer has finished it
                    self.delete(name)

    def names(self) -> list[str]:
        """Return the names of everything in the folder."""
        self._fs.invalidate_cache(self._root)
        try:
            return [path.rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False)]
        except FileNotFoundError:  # where folders are prefixes of names (S3), an empty one does not exist
            return []

    def delete(self, file: str) -> None:
        """Delete a file."""
        self._fs.rm_file(self._path(file))

    def _path(self, file: str) -> str:
        return f"{self._root}/{file}"

    # --- reading ---

    def content(self, file: str, limit: int) -> bytes:
        """Return what is in a file, cut off after ``limit`` bytes."""
        self._fs.invalidate_cache(self._root)
        try:
            return self._content(file, limit)
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS: the file was replaced while it was being read
                raise
            return self._content(file, limit)

    def _content(self, file: str, limit: int) -> bytes:
        if self.local is None:
            return self._fs.cat_file(self._path(file), start=0, end=limit)
        with io.BufferedReader(_open_regular(self.local / file)) as opened:
            return opened.read(limit)

    def open(self, file: str) -> File:
        """Open a file for reading."""
        if self.local is None:
            return io.BytesIO(self._fs.cat_file(self._path(file)))
        return _open_regular(self.local / file)

    # --- writing ---

    def write(self, file: str, content: bytes) -> None:
        """Write a file, or replace it."""
        if self.local is None:
            self._fs.pipe_file(self._path(file), content)
        else:
            self._replace(self.local / file, lambda path: path.write_bytes(content))

    def write_tensors(self, file: str, tensors: Mapping[str, Tensor]) -> None:
        """Write a safetensors file."""
        if self.local is None:
            self._fs.pipe_file(self._path(file), tensor_file.dump(tensors))
        else:
            self._replace(self.local / file, lambda path: tensor_file.write(path, tensors))

    def _replace(self, path: Path, write: Callable[[Path], object]) -> None:
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{_UNFINISHED}")
        try:
            unfinished.touch(exist_ok=False)
            mode = unfinished.stat().st_mode
            write(unfinished)
            unfinished.chmod(mode)  # safetensors has replaced it by a file for this user alone
            if self._durable:
                _flush(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def flush(self) -> None:
        """Flush the names of the files to the disk, if it is a local one and the store is durable."""
        if self._durable and self.local is not None:
            _flush(self.local)


def _open_regular(path: Path) -> io.FileIO:
    """Open a local file; OSError for a pipe or a device: reading it may wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe does not wait either
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return io.FileIO(descriptor)
    os.close(descriptor)
    raise OSError(f"{path.name} is no regular file")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
