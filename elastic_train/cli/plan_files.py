"""Files that ``elastic-train plan`` writes: what can be known to fail is refused before the first is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_train.cli.guard import UserError

if TYPE_CHECKING:
    from elastic_train.cli.plan_answer import Answer


@dataclass(frozen=True, slots=True)
class Files:
    """Where to write; None: not asked for."""

    picture: Path | None
    html: Path | None
    job: Path | None

    def check(self) -> None:
        """Raises UserError for a place that cannot be written to."""
        for option, path in self._given():
            try:
                folder, there = path.is_dir(), path.parent.is_dir()
            except OSError as error:
                raise UserError(f"{option} {path}: {error.strerror or error}") from None
            if folder:
                raise UserError(f"{option} {path}: is a folder; give a file")
            if not there:
                raise UserError(f"{option} {path}: there is no folder {path.parent}")
        if self.job is not None and self.job.exists():
            raise UserError(f"{self.job} exists; give another file")
        if self.picture is not None and self.picture.suffix.lower() not in (".svg", ".png"):
            raise UserError(f"--pipeline-picture {self.picture}: must end in .svg or .png")

    def write(self, answer: Answer, show: int) -> None:
        """``show``: number of the layout that they are about. Raises UserError."""
        contents = dict(self._contents(answer, show))
        for option, path in self._given():
            try:
                path.write_bytes(contents[option])
            except OSError as error:
                raise UserError(f"{option} {path}: cannot be written: {error.strerror or error}") from None

    def _given(self) -> Iterator[tuple[str, Path]]:
        for option, path in (("--write-job", self.job), ("--pipeline-picture", self.picture), ("--html", self.html)):
            if path is not None:
                yield option, path

    def _contents(self, answer: Answer, show: int) -> Iterator[tuple[str, bytes]]:
        row, question = answer.priced[show - 1], answer.question
        if self.picture is not None:
            from elastic_train.cli.plan_pictures import picture

            yield "--pipeline-picture", picture(row, self.picture.suffix.lower()[1:])
        if self.job is not None:
            from elastic_train.cli.plan_job import job_text

            yield "--write-job", job_text(row.candidate, question).encode()
        if self.html is not None:
            from elastic_train.cli.plan_html import page

            yield "--html", page(answer, show).encode()
