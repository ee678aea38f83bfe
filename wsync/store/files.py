"""The files in a store's folder, on any file system that ``fsspec`` has: each is seen when all of it is there.

On a local file system a file is written under another name, flushed to the disk and renamed; where files are written in
place (SFTP), the same without flushing. Other file systems (S3, memory) show an object when all of it is there.
"""

from __future__ import annotations

import errno
import io
import os
import re
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from wsync.errors import NotConnected

File = io.FileIO | io.BytesIO
"""A version's file, open for reading."""
_UNFINISHED = ".unfinished"
_IN_PLACE = {"ftp", "sftp"}
"""File systems on which a file is seen while it is being written, but on which ``mv`` replaces another file."""
_NOT_REPLACING = {"hdfs", "smb", "webhdfs"}
"""Others, on which it does not, or deletes the other file first."""


class StoreFiles:
    """The files in the folder at a URL. Methods raise whatever the library of the file system raises.

    Args:
        url: see ``VersionStore``.
        durable: whether a file is flushed to the disk before it has its name (local file systems).

    Attributes:
        url: as given, for messages: without user, password and query.
        writer: a token of this object, in the names of what it writes.

    Raises:
        NotConnected: the file system cannot be opened.
    """

    def __init__(self, url: str, durable: bool) -> None:
        self.url = re.sub(r"(?<=://)[^/]*@|\?.*", "", url) if "://" in url else url
        self._given_url = url
        self.writer = secrets.token_hex(4)
        self._durable = durable
        try:
            opened, self._root = fsspec.core.url_to_fs(url)
        except Exception as error:  # besides OSError: whatever the library of the file system raises
            raise NotConnected(f"the store {self.url} cannot be opened: {self.error_text(error)}") from error
        protocol = opened.protocol
        self._protocols = {protocol} if isinstance(protocol, str) else {*protocol}
        self._class = type(opened)

    @property
    def folder(self) -> Path | None:
        """The folder, if it is on a local file system."""
        return Path(self._root) if issubclass(self._class, LocalFileSystem) else None

    @property
    def _fs(self) -> Any:
        """This thread's file system: ``fsspec`` keeps one for each, as an SFTP connection serves one call at a time."""
        return fsspec.core.url_to_fs(self._given_url)[0]

    def after_error(self, error: Exception) -> str:
        """Return ``error_text``; the next call makes a new connection, in case this one is lost."""
        if self._protocols & _IN_PLACE:
            self._class.clear_instance_cache()
        return self.error_text(error)

    def error_text(self, error: Exception) -> str:
        """Return an error of a library as text, without user, password and query of the URLs in it."""
        text = f"{type(error).__name__}: {error}".replace(self._given_url, self.url)  # which may have a blank
        return re.sub(r"://(?:[^\s/?'\"]*@)?([^\s?'\"]*)(?:\?[^\s'\"]*)?", r"://\1", text)

    def make_folder(self) -> None:
        """Make the folder, and delete what a killed trainer left unfinished."""
        if refused := self._protocols & _NOT_REPLACING:
            raise OSError(f"{min(refused)}:// cannot replace a file as a whole: mount that file system")
        folder = self.folder
        new = [] if folder is None else [path for path in (folder, *folder.parents) if not path.exists()]
        self._fs.makedirs(self._root, exist_ok=True)
        for path in new if self._durable else ():
            _flush(path.parent)
        for name in self.names():
            if name.endswith(_UNFINISHED):
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
        root, mark, query = self._root.partition("?") if "https" in self._protocols else (self._root, "", "")
        return f"{root}/{file}{mark}{query}"

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
        if self.folder is None:
            return self._fs.cat_file(self._path(file), start=0, end=limit)
        with io.BufferedReader(_open_regular(self.folder / file)) as opened:
            return opened.read(limit)

    def open(self, file: str) -> File:
        """Open a file: a local one is read, not mapped, because memory of a file that is cut off cannot be read."""
        if self.folder is None:
            return io.BytesIO(self._fs.cat_file(self._path(file)))
        return _open_regular(self.folder / file)

    # --- writing ---

    def write(self, file: str, *pieces: bytes | memoryview) -> None:
        """Write a file, or replace it."""
        if self.folder is not None:
            self._write_local(self.folder / file, pieces)
        elif self._protocols & _IN_PLACE:
            unfinished = self._unfinished(file)
            try:
                self._fs.pipe_file(self._path(unfinished), b"".join(pieces))
                self._fs.mv(self._path(unfinished), self._path(file))
            except BaseException:
                with suppress(Exception):  # the error above is the one to report
                    self.delete(unfinished)
                raise
        else:
            self._fs.pipe_file(self._path(file), b"".join(pieces))

    def _write_local(self, path: Path, pieces: Sequence[bytes | memoryview]) -> None:
        unfinished = path.with_name(self._unfinished(path.name))
        try:
            with unfinished.open("xb") as opened:  # "x": a link that another process has made is not followed
                opened.writelines(pieces)
            if self._durable:
                _flush(unfinished)
            unfinished.replace(path)
        except BaseException:
            with suppress(OSError):
                unfinished.unlink()
            raise

    def _unfinished(self, file: str) -> str:
        return f"{file}.{self.writer}{_UNFINISHED}"

    def flush(self) -> None:
        """Flush the names of the files to the disk, if it is a local one and the store is durable."""
        if self._durable and self.folder is not None:
            _flush(self.folder)


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
