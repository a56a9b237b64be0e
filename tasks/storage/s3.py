"""S3 as a file system of fsspec, on boto3: credentials and endpoint are found as AWS's tools find them.

`s3fs` would do the same, but it pins another botocore than boto3 needs. Registered by the
entry point `fsspec.specs`, so that `checkpoint.directory: s3://bucket/prefix` works wherever this
package is installed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from fsspec import AbstractFileSystem

_NOT_THERE = ("404", "NoSuchKey", "NoSuchBucket")
_EXISTS = ("412", "PreconditionFailed", "ConditionalRequestConflict")
_REFUSED = ("403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch")


class BucketFiles(AbstractFileSystem):  # type: ignore[misc]  # fsspec has no types
    """What checkpoints need of S3: whole objects, put under a condition, listed by prefix."""

    protocol: ClassVar[tuple[str, ...]] = ("s3",)
    root_marker = ""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        config = Config(connect_timeout=5, read_timeout=60, retries={"mode": "standard", "max_attempts": 4})
        self._client = boto3.client("s3", config=config)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List what lies directly under a prefix.

        Raises:
            FileNotFoundError: Nothing does.
        """
        bucket, key = self._parts(path)
        prefix = f"{key.rstrip('/')}/" if key else ""
        found: list[dict[str, Any]] = []
        pages = self._client.get_paginator("list_objects_v2")
        with _as_files_do(path):
            for page in pages.paginate(Bucket=bucket, Prefix=prefix, Delimiter="/"):
                folders = (entry["Prefix"].rstrip("/") for entry in page.get("CommonPrefixes", ()))
                found += [{"name": f"{bucket}/{name}", "type": "directory", "size": 0} for name in folders]
                found += [
                    {"name": f"{bucket}/{entry['Key']}", "type": "file", "size": entry["Size"]}
                    for entry in page.get("Contents", ())
                ]
        if not found:
            return self._one(path, detail)
        return found if detail else [entry["name"] for entry in found]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return size and kind of an object, or that the path is a prefix of some."""
        bucket, key = self._parts(path)
        if key:
            try:
                with _as_files_do(path):
                    head = self._client.head_object(Bucket=bucket, Key=key)
                return {"name": f"{bucket}/{key}", "type": "file", "size": head["ContentLength"]}
            except FileNotFoundError:
                pass
        prefix = f"{key.rstrip('/')}/" if key else ""
        with _as_files_do(path):
            page = self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, MaxKeys=1)
        if not page.get("KeyCount"):
            raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
        return {"name": f"{bucket}/{key}".rstrip("/"), "type": "directory", "size": 0}

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return an object, or a part of it."""
        bucket, key = self._parts(path)
        with _as_files_do(path):
            body: bytes = self._client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return body[start:end]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Write an object; with mode "create" only if there is none."""
        bucket, key = self._parts(path)
        condition = {"IfNoneMatch": "*"} if mode == "create" else {}
        with _as_files_do(path):
            self._client.put_object(Bucket=bucket, Key=key, Body=value, **condition)

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        """Upload a file, in parts if it is large."""
        bucket, key = self._parts(rpath)
        with _as_files_do(rpath):
            self._client.upload_file(lpath, bucket, key)

    def get_file(self, rpath: str, lpath: str, **_: Any) -> None:
        """Download an object."""
        bucket, key = self._parts(rpath)
        with _as_files_do(rpath), Path(lpath).open("wb") as stream:
            self._client.download_fileobj(bucket, key, stream)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        """Copy an object."""
        (bucket, key), (to_bucket, to_key) = self._parts(path1), self._parts(path2)
        if self.info(path1)["type"] == "file":
            with _as_files_do(path1):
                self._client.copy({"Bucket": bucket, "Key": key}, to_bucket, to_key)

    def rm_file(self, path: str) -> None:
        """Delete an object; a prefix is gone with its last one."""
        bucket, key = self._parts(path)
        with _as_files_do(path):
            self._client.delete_object(Bucket=bucket, Key=key)

    _rm = rm_file

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing: a prefix is there with its first object."""

    def rmdir(self, path: str) -> None:
        """Do nothing: a prefix is gone with its last object."""

    def _one(self, path: str, detail: bool) -> list[Any]:
        entry = self.info(path)
        return [entry] if detail else [entry["name"]]

    def _parts(self, path: str) -> tuple[str, str]:
        bucket, _, key = self._strip_protocol(path).partition("/")
        return bucket, key


@contextmanager
def _as_files_do(path: str) -> Iterator[None]:
    """Raise what a file system would, so that callers tell missing, refused and unreachable apart."""
    try:
        yield
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code", ""))
        if code in _NOT_THERE:
            raise FileNotFoundError(errno.ENOENT, str(error), path) from error
        if code in _EXISTS:
            raise FileExistsError(errno.EEXIST, str(error), path) from error
        if code in _REFUSED:
            raise PermissionError(errno.EACCES, str(error), path) from error
        raise OSError(errno.EIO, str(error), path) from error
    except BotoCoreError as error:
        raise OSError(errno.ETIMEDOUT, str(error), path) from error
