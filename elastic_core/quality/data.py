"""What data a model was trained on, as a fingerprint that two trainings can be compared by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pydantic import BaseModel, ConfigDict, Field


class DataPrint(BaseModel):
    """The content of a data set: equal digests are equal data, wherever the files lie."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    digest: str = Field(description="Of names and contents of all files, and of how the config reads them.")
    files: int = Field(0, description="Files; 0 where the data come with the program.")
    size: int = Field(0, description="Bytes.")
    folders: Mapping[str, int] = Field(
        default_factory=dict, description="Files by folder: by class, as a rule."
    )

    def news_since(self, before: DataPrint | None) -> str:
        """Return what is new in these data as a sentence, "" if nothing is."""
        if before is None:
            return f"no model has seen these data: {_counted(self.files)}" if self.files else "no model yet"
        if self.digest == before.digest:
            return ""
        changes = list(self._changes(before))
        return "; ".join(changes) if changes else f"contents changed in {_counted(self.files)}"

    def _changes(self, before: DataPrint) -> Iterator[str]:
        for name in sorted({*self.folders, *before.folders}):
            old, new = before.folders.get(name, 0), self.folders.get(name, 0)
            if old != new:
                yield f"{name}: {old} -> {new} files"


def _counted(files: int) -> str:
    return f"{files} file{'s' * (files != 1)}"
