"""Text to token shards: look at all of it, train a tokenizer, encode, and last write the manifest of the data set.

Every data set lies in a folder of its own that is named after its inputs; the manifest beside it says which one counts.
So two runs at once cannot mix their shards, and one data set is replaced by another in a single write.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import tokenizers

from elastic_train.data.encode import EncodeTask, read_shards
from elastic_train.data.errors import DataError
from elastic_train.data.given import TOKENIZER
from elastic_train.data.manifest import MANIFEST, Manifest, Tokenizer, inputs_digest
from elastic_train.data.parts import PART_BYTES, cut
from elastic_train.data.publish import Prepared, Publication, files_of
from elastic_train.data.scan import Scan, ScanTask
from elastic_train.data.selection import Selection
from elastic_train.data.shards import store_file
from elastic_train.data.stages import KeptTask, Orders, Result, one_by_one, results
from elastic_train.data.tokenizer import (
    EOS_ID,
    SMALLEST_VOCABULARY,
    GivenTokenizer,
    check_end,
    number_of_entries,
    parse_tokenizer,
    train_tokenizer,
)
from elastic_train.storage.errors import NotFound
from elastic_train.storage.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_train.config.operation import StorageConfig
    from elastic_train.data.corpus import Corpus
    from elastic_train.data.manifest import File, Shard
    from elastic_train.data.parts import Part
    from elastic_train.data.stages import Run, Task

    Progress = Callable[[str, int, int], None]
    """Called with (phase, bytes done, bytes in all); phases: read, tokenizer, encode."""

SHARD_TOKENS = 2**26
BATCH_TOKENS = 2**18
SAMPLE_BYTES = 16 * 2**20
SAMPLE_SPREAD = 8
"""How many times its share of the input's bytes a part keeps of the sample: the text may be anywhere in the input."""
PREPARATION = 4
"""Goes up with every change that makes other bytes of the same input and settings: what was made before is not reused,
nor are its work files gone on with.
"""
WORK, LEFT_OUT = ".work", "left_out.jsonl"


@dataclass(frozen=True, slots=True)
class Settings:
    """What decides the tokens and the bytes, beside the input and the tokenizer. Sizes are upper bounds.

    ``vocab_size``, ``sample_bytes``: entries of a tokenizer that is trained, and how much text it is trained on.
    ``part_bytes``: of input for one task. ``max_characters``: longer documents are left out. ``keep_duplicates``:
    copies of documents are not.
    """

    vocab_size: int
    sample_bytes: int = SAMPLE_BYTES
    shard_tokens: int = SHARD_TOKENS
    batch_tokens: int = BATCH_TOKENS
    part_bytes: int = PART_BYTES
    max_characters: int | None = None
    keep_duplicates: bool = False

    def __post_init__(self) -> None:
        for name in ("sample_bytes", "shard_tokens", "batch_tokens", "part_bytes", "max_characters"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name}={value} must be at least 1")


def prepare(
    corpus: Corpus,
    out: str,
    vocab_size: int,
    *,
    storage: StorageConfig | None = None,
    progress: Progress | None = None,
    overwrite: bool = False,
    given: GivenTokenizer | None = None,
    run: Run = one_by_one,
    **settings: Any,
) -> Prepared:
    """Makes the data set of ``corpus`` in the folder ``out`` (local or S3, ``storage`` has the endpoint).

    The same corpus and ``settings`` (:class:`Settings`) give the same bytes, whoever ``run`` gives the work to. The
    tokenizer is ``given`` or trained. A run that was killed is gone on with.
    A folder that holds a data set of the same inputs is reused (made again when files are missing); one of other inputs
    is refused unless ``overwrite``.
    Raises :class:`DataError` or :class:`~elastic_train.storage.errors.StorageError`.
    """
    if given is None and vocab_size < SMALLEST_VOCABULARY:
        raise DataError(f"vocab_size={vocab_size} is too small; byte-level BPE needs at least {SMALLEST_VOCABULARY}")
    report = progress or (lambda phase, done, total: None)
    wanted = Settings(vocab_size, **settings)
    work = _Preparation(corpus, Store.open(out, storage), storage, wanted, given, run, report, overwrite)
    return work.do()


class _Preparation:
    def __init__(
        self,
        corpus: Corpus,
        store: Store,
        storage: StorageConfig | None,
        settings: Settings,
        given: GivenTokenizer | None,
        run: Run,
        report: Progress,
        overwrite: bool,
    ) -> None:
        self._corpus, self._store, self._storage, self._settings = corpus, store, storage, settings
        self._given, self._run, self._report = given, run, report
        if given is not None:
            check_end(given)
        _check_apart(corpus, store)
        _check_folder(store)
        self._parts: tuple[Part, ...] = tuple(cut(corpus, settings.part_bytes))
        listing = [(file.uri, file.size, file.modified, file.format) for file in corpus.files]
        name = hashlib.sha256(repr((listing, sorted(self._decisive().items()))).encode()).hexdigest()
        self._work = store.sub(f"{WORK}/{name[:16]}")
        self._place = Publication(store, f"{WORK}/{name[:16]}", overwrite)

    def do(self) -> Prepared:
        try:
            return self._do()
        except DataError:  # nothing to go on with: what is wrong has to change first
            self._place.tidy()
            raise

    def _do(self) -> Prepared:
        scans = self._scan()
        selection = Selection(self._parts, scans, self._settings.keep_duplicates)
        inputs = self._inputs(scans, selection)
        digest = inputs_digest(inputs)
        if (there := self._place.reusable(digest)) is not None:
            return there
        folder = digest[:16]
        given = self._tokenizer(selection, inputs["corpus_bytes"])
        dtype: Literal["uint16", "uint32"] = "uint16" if number_of_entries(given) <= 2**16 else "uint32"
        shards = self._encode(scans, selection, given, dtype, folder)
        manifest = Manifest(
            tokenizer=self._write_tokenizer(given, folder),
            dtype=dtype,
            labelled=self._corpus.chat is not None,
            tokens=sum(shard.tokens for shard in shards),
            documents=sum(shard.documents for shard in shards),
            batch_tokens=self._settings.batch_tokens,
            shards=tuple(shards),
            left_out=self._write_left_out(selection, folder),
            left_out_counts=selection.counts(),
            inputs=inputs,
            inputs_sha256=digest,
        )
        return self._place.publish(manifest)

    def _decisive(self) -> dict[str, Any]:
        """Everything that decides the bytes but what the documents are."""
        corpus = self._corpus
        settings = asdict(self._settings)
        if self._given is not None:
            tokenizer = f"given: sha256 {self._given.sha256}, eos_id {self._given.eos_id}"
            settings |= {"vocab_size": number_of_entries(self._given), "sample_bytes": 0}
        else:
            tokenizer = f"byte-level BPE by tokenizers {tokenizers.__version__}"
        return {
            "preparation": PREPARATION,
            "corpus": corpus.name,
            "formats": sorted({file.format for file in corpus.files}),
            "column": corpus.column,
            "chat_template_sha256": corpus.chat.sha256 if corpus.chat is not None else None,
            "tokenizer": tokenizer,
            **settings,
        }

    def _scan(self) -> list[Scan]:
        sizes = [sum(piece.size for piece in part) for part in self._parts]
        wanted, total = 0 if self._given is not None else self._settings.sample_bytes, max(sum(sizes), 1)
        task = ScanTask(self._corpus, self._parts, self._settings.max_characters)
        orders = [
            {"part": number, "bytes": size, "sample_bytes": min(wanted, -(-SAMPLE_SPREAD * wanted * size // total))}
            for number, size in enumerate(sizes)
        ]
        return self._results("scan", task, orders, Scan, lambda scan: True, "read")

    def _inputs(self, scans: list[Scan], selection: Selection) -> dict[str, Any]:
        size = sum(selection.kept_bytes(part) for part in range(len(scans)))
        if not size:
            counts = ", ".join(f"{count} {kind}" for kind, count in selection.counts().items())
            why = f"all of its documents are left out ({counts})" if counts else "it has no document"
            raise DataError(f"corpus {self._corpus.name} has no text: {why}")
        digest = hashlib.sha256("".join(scan.sha256 for scan in scans).encode()).hexdigest()
        return {**self._decisive(), "corpus_sha256": digest, "corpus_bytes": size}

    def _tokenizer(self, selection: Selection, size: int) -> GivenTokenizer:
        self._report("tokenizer", 0, size)
        given = self._given or self._trained(selection)
        self._report("tokenizer", size, size)
        return given

    def _trained(self, selection: Selection) -> GivenTokenizer:
        with suppress(NotFound):
            return GivenTokenizer(self._work.read(TOKENIZER), EOS_ID)
        tokenizer = train_tokenizer(selection.sample(self._settings.sample_bytes), self._settings.vocab_size)
        given = GivenTokenizer(tokenizer.to_str(pretty=True).encode() + b"\n", EOS_ID)
        self._work.write(TOKENIZER, [given.text])
        return given

    def _encode(
        self,
        scans: list[Scan],
        selection: Selection,
        given: GivenTokenizer,
        dtype: Literal["uint16", "uint32"],
        folder: str,
    ) -> list[Shard]:
        settings = self._settings
        task = EncodeTask(
            self._corpus, self._parts, settings.max_characters, given, dtype, settings.shard_tokens,
            settings.batch_tokens, self._store.uri, self._storage, folder,
        )  # fmt: skip
        orders = [
            {
                "part": number,
                "bytes": selection.kept_bytes(number),
                "duplicates": selection.duplicates(number),
                "sha256": scan.sha256,
            }
            for number, scan in enumerate(scans)
        ]
        sizes = {entry.path: entry.size for entry in self._store.list(f"{folder}/")}

        def usable(shards: tuple[Shard, ...]) -> bool:
            return all(sizes.get(path) == size for shard in shards for path, size in files_of(shard))

        made = self._results(f"encode-{folder}", task, orders, read_shards, usable, "encode")
        return [shard for shards in made for shard in shards]

    def _results(
        self,
        name: str,
        task: Task,
        orders: Orders,
        parse: Callable[[bytes], Result],
        usable: Callable[[Result], bool],
        phase: str,
    ) -> list[Result]:
        kept = KeptTask(task, name, self._work.uri, self._storage, optional=self._place.is_taken)
        return results(kept, orders, parse, usable, self._run, lambda done, total: self._report(phase, done, total))

    def _write_tokenizer(self, given: GivenTokenizer, folder: str) -> Tokenizer:
        file = store_file(self._store, f"{folder}/{TOKENIZER}", given.text)
        tokenizer = parse_tokenizer(given)
        return Tokenizer(
            path=file.path,
            sha256=file.sha256,
            vocab_size=number_of_entries(given),
            eos_id=given.eos_id,
            eos_token=tokenizer.id_to_token(given.eos_id),
        )

    def _write_left_out(self, selection: Selection, folder: str) -> File | None:
        lines = b"".join(selection.left_out())
        return store_file(self._store, f"{folder}/{LEFT_OUT}", lines) if lines else None


def _check_folder(store: Store) -> None:
    """What is to be a folder, or one above it, must not be a file."""
    manifest = store.local_path(MANIFEST)
    there = next((folder for folder in manifest.parents if folder.exists()), None) if manifest is not None else None
    if there is not None and not there.is_dir():
        raise DataError(f"the output {store.uri} cannot be a folder: {there} is a file; choose another name")


def _check_apart(corpus: Corpus, store: Store) -> None:
    """A data set must not be input of the run that makes it, nor of the next one."""
    inside = next((file for file in corpus.files if file.uri.startswith(f"{store.uri.rstrip('/')}/")), None)
    if inside is not None:
        raise DataError(f"the input {inside.uri} lies in the output {store.uri}; choose another folder")
    for path in (MANIFEST, f"x/{TOKENIZER}", f"x/{LEFT_OUT}", "x/shard-00000.arrow", "x/shard-00000.ends.arrow"):
        if corpus.takes(f"{store.uri.rstrip('/')}/{path}"):
            raise DataError(f"the output {store.uri} lies in the input; choose another folder")
