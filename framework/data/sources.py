"""A setting like `data.train` opened: its files, their row format, and what every row says.

`training_sources` and `validation_sources` say which there are. `Wanted.open` finds the files of one and settles each one's format from
its first row; `Source.items` then yields what the rows say. Rows that
are wrong do not stop the reading: their problems are collected, so that a user sees the first few and how many more there are.

`peek` is the quick look that `framework check` takes: files, columns and first rows, without torch, transformers or `datasets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from framework.config.errors import Problem, UserError
from framework.config.schema import DataConfig, SourceConfig
from framework.data.conversations import RowFormat, Yields, choose_format, parse
from framework.data.files import Row, find_files, shown
from framework.data.hub import SCHEME, hub_files, hub_name
from framework.data.read import first_rows, read_rows
from framework.data.turns import Completion, Conversation, Passage, Pretokenised

Item = Conversation | Completion | Passage | Pretokenised
SHOWN_PROBLEMS = 5
PEEKED_ROWS = 20
PEEKED_FILES = 8


@dataclass
class Faults:
    """Problems of rows: the first few are kept to be shown, the rest are counted."""

    problems: list[Problem] = field(default_factory=list)
    count: int = 0

    def add(self, *problems: Problem) -> None:
        self.count += len(problems)
        self.problems += problems[: SHOWN_PROBLEMS - len(self.problems)]

    def listed(self, what: str) -> list[Problem]:
        """What to show; `what` names the source in the line that counts the rest."""
        more = self.count - len(self.problems)
        if not more:
            return self.problems
        rows = "one more row" if more == 1 else f"{more:,} more rows"
        return [*self.problems, Problem(path=what, got=f"{rows} with problems", expected="rows like those described above")]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A source that the recipe names."""

    setting: str
    """`data.train` or `data.validation`, `data.train[0]` where there are several."""
    path: str
    config: DataConfig
    """With the format and the columns of this source."""
    max_rows: int | None = None
    weight: float | None = None

    @property
    def is_on_hub(self) -> bool:
        return self.path.startswith(SCHEME)

    def open(self) -> Source:
        """Raises UserError for missing or empty files, unknown columns, and a mix of documents, conversations and completions."""
        faults = Faults()
        files = self.files(faults)
        if faults.count:
            raise UserError(*faults.listed(self.setting))
        return Source(self.setting, tuple(files), self.max_rows)

    def files(self, faults: Faults) -> list[tuple[Path, RowFormat]]:
        """Each file that can be read, with its format; what is wrong with the others goes to `faults`. UserError where there is no file."""
        opened: list[tuple[Path, RowFormat]] = []
        for file in self._found():
            try:
                opened.append((file, _format_of(file, self.setting, self.config, opened)))
            except UserError as error:
                faults.add(*error.problems)
        return opened

    def _found(self) -> list[Path]:
        if not self.is_on_hub:
            return find_files(self.path, self.setting)
        from framework.data.cache import cache_folder  # numpy, which a first look does not need

        return hub_files(self.path, self.setting, cache_folder(self.config.cache_dir))


@dataclass(frozen=True)
class Source:
    """The files behind one setting, whose rows are all documents, all conversations or all completions."""

    setting: str
    """`data.train`, `data.train[0]`, `data.validation` or `data.validation[0]`."""
    files: tuple[tuple[Path, RowFormat], ...]
    max_rows: int | None = None

    @property
    def yields(self) -> Yields:
        return self.files[0][1].yields

    @property
    def is_text(self) -> bool:
        """Whether rows are joined and cut into chunks."""
        return self.yields == "documents"

    def items(self, faults: Faults) -> Iterator[tuple[Row, Item]]:
        """(the row, what it says) for every good row in order; the others go to `faults`. A long document comes as several rows."""
        read, begins = 0, True
        for file, form in self.files:
            for row in read_rows(file):
                if begins and read == self.max_rows:
                    return
                read += begins
                try:
                    if isinstance(row, Problem):
                        raise UserError(row)
                    item = parse(row, form)
                except UserError as error:
                    faults.add(*error.problems)
                    begins = True
                    continue
                if isinstance(item, str):
                    item = Passage(item, begins, row.goes_on)
                begins = not row.goes_on
                yield row, item


def training_sources(config: DataConfig) -> list[Wanted]:
    """Raises UserError where there is none."""
    if not config.train:
        expected = "the training data: a file, folder or glob"
        raise UserError(Problem(path="data.train", got="nothing", expected=expected, fix="data.train=/path/to/file.jsonl"))
    return _sources("data.train", config.train, config, config.max_rows)


def validation_sources(config: DataConfig) -> list[Wanted]:
    """Those that the recipe names; none where validation data are held out of the training data, or not wanted."""
    return [] if config.validation is None else _sources("data.validation", config.validation, config, None)


def _sources(setting: str, value: str | list[str | SourceConfig], config: DataConfig, max_rows: int | None) -> list[Wanted]:
    if isinstance(value, str):
        return [Wanted(setting=setting, path=value, config=config, max_rows=max_rows)]
    listed = [SourceConfig(path=source) if isinstance(source, str) else source for source in value]
    return [
        Wanted(
            setting=f"{setting}[{number}]",
            path=own.path,
            config=replace(config, format=own.format or config.format, columns=own.columns or config.columns),
            max_rows=own.max_rows or max_rows,
            weight=own.weight,
        )
        for number, own in enumerate(listed)
    ]


def holds_conversations(config: DataConfig) -> bool:
    """Whether the first of the training sources has conversations, and no plain text."""
    return training_sources(config)[0].open().yields == "conversations"


def _format_of(file: Path, setting: str, config: DataConfig, opened: list[tuple[Path, RowFormat]]) -> RowFormat:
    """How the rows of `file` are read, which must yield what those of the files `opened` before do. Raises UserError."""
    form = choose_format(_first_good_row(file, setting), config.format, config.columns)
    _check_train_on(form, config, shown(file))
    other, other_form = opened[0] if opened else (file, form)
    if form.yields != other_form.yields:
        got = f"{form.kind} rows in {shown(file)} and {other_form.kind} rows in {shown(other)} ({form.yields} and {other_form.yields})"
        fix = f"{setting}='{file.parent}/*{file.suffix}'"
        raise UserError(Problem(path=setting, got=got, expected="one of these in all files", fix=fix))
    return form


def peek(config: DataConfig) -> list[Problem]:
    """Everything that the first rows of each file tell is wrong with `data.train` and `data.validation`."""
    try:
        wanted = [*training_sources(config), *validation_sources(config)]
    except UserError as error:
        return list(error.problems)
    return peek_at(wanted)


def peek_at(wanted: list[Wanted]) -> list[Problem]:
    """The same for some sources."""
    return [problem for source in wanted for problem in _peek(source)]


def _peek(wanted: Wanted) -> list[Problem]:
    faults = Faults()
    try:
        if wanted.is_on_hub:  # nothing is downloaded for a first look
            hub_name(wanted.path, wanted.setting)
            return []
        for file, form in wanted.files(faults)[:PEEKED_FILES]:
            for row in first_rows(file, min(PEEKED_ROWS, wanted.max_rows or PEEKED_ROWS)):
                try:
                    if isinstance(row, Problem):
                        raise UserError(row)
                    parse(row, form)
                except UserError as error:
                    faults.add(*error.problems)
    except UserError as error:
        faults.add(*error.problems)
    return faults.listed(wanted.setting)


def _check_train_on(form: RowFormat, config: DataConfig, file: str) -> None:
    """Raises UserError where `data.train_on` would do nothing, or not what it says."""
    if form.kind == "completion" and config.train_on == "all":
        got, fix = f"all with the prompts and completions of {file}", "data.train_on=assistant"
        raise UserError(Problem(path="data.train_on", got=got, expected="rows without a prompt that is only given", fix=fix))
    if form.yields == "documents" and config.train_on == "last":
        got, fix = f"last with the documents of {file}", "data.train_on=assistant"
        raise UserError(Problem(path="data.train_on", got=got, expected="conversations, which have a last answer", fix=fix))

    if form.yields == "ids" and config.train_on != "assistant":
        got, expected = f"{config.train_on} with the token ids of {file}", "labels or loss_mask in the rows to say what is trained"
        raise UserError(Problem(path="data.train_on", got=got, expected=expected, fix="data.train_on=assistant"))


def _first_good_row(file: Path, setting: str) -> Row:
    rows = first_rows(file, PEEKED_ROWS)
    if not rows:
        raise UserError(Problem(path=setting, got=f"{shown(file)}, a file without rows", expected="at least one row"))
    good = next((row for row in rows if isinstance(row, Row)), None)
    if good is None:
        raise UserError(*rows[:SHOWN_PROBLEMS])
    return good
