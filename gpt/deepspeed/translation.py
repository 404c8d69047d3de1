"""The translation of one DeepSpeed configuration: its keys, the settings it sets, and those it is combined with."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from rich.markup import escape
from rich.table import Table

from gpt.deepspeed.keys import as_text
from parallel.validation.errors import ConfigError

AUTO = "auto"  # a value that transformers replaces with one of its own arguments
Verdict = Literal["mapped", "not needed", "left to the settings", "refused"]


@dataclass(frozen=True)
class FileKey:
    """A key of the file, and how it is translated.

    `written` is "key=value" as in the file. `name` and `value` are those that the current version of DeepSpeed uses.
    `verdict` is None until the key is translated or refused; `reason` and `settings` belong to the verdict.
    """

    written: str
    name: str
    value: Any
    verdict: Verdict | None = None
    reason: str = ""
    settings: tuple[str, ...] = ()


@dataclass
class Translation:
    """The settings that the file at `path` sets, and the settings that they are combined with.

    Settings have dotted names. `base` has all of them as they are without the file, and `options` are the names of
    those that the command line sets. `values` are the values of mapped keys, by their current names in DeepSpeed.
    """

    path: Path
    base: Mapping[str, Any]
    options: frozenset[str]
    num_ranks: int
    keys: list[FileKey] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def num_batch_ranks(self) -> int:
        """The number of data-parallel ranks, or groups of them that share a context, with samples of their own."""
        return max(1, self.num_ranks // (self.base["parallel.tensor_size"] * self.base["parallel.context_size"]))

    def is_auto(self, key: str) -> bool:
        """Return True if the file has the key with the value "auto"."""
        return any(found.name == key and found.value == AUTO for found in self.keys)

    def is_option(self, setting: str) -> bool:
        """Return True if the command line sets the setting, or a group that it belongs to."""
        return any(f"{setting}.".startswith(f"{option}.") for option in self.options)

    def chosen(self, setting: str) -> Any:
        """Return the setting's final value: an option overrides the file, and the file everything else."""
        is_from_file = setting in self.settings and not self.is_option(setting)
        return self.settings[setting] if is_from_file else self.base[setting]

    def value_and_source(self, key: str, setting: str) -> tuple[Any, str]:
        """Return the value of a key that corresponds to one setting, and the text "name=value" of its source.

        An option overrides the key, and "auto" stands for the setting. The value is None if the file lacks the key.
        """
        if self.is_option(setting):
            value = self.base[setting]
            return value, f"--{setting}={value}"
        if self.is_auto(key):
            value = self.base[setting]
            return value, f"{setting}={value}"
        value = self.values.get(key)
        return value, f"{key}={value}"

    @property
    def refused(self) -> list[FileKey]:
        """The keys that are refused."""
        return [key for key in self.keys if key.verdict == "refused"]

    def check(self) -> None:
        """Raise ConfigError with every key that is refused."""
        if self.refused:
            raise ConfigError(f"{self.path}: {'; '.join(f'{key.written}: {key.reason}' for key in self.refused)}")

    def table(self) -> Table:
        """Return a table of all keys of the file, grouped by verdict."""
        table = Table(title=f"Keys of {self.path}", title_justify="left")
        table.add_column("DeepSpeed", overflow="fold")
        table.add_column("", no_wrap=True)
        table.add_column("here", overflow="fold")
        for verdict in get_args(Verdict):
            for key in self.keys:
                if key.verdict == verdict:
                    effects = "; ".join(filter(None, [*map(self._effect, key.settings), key.reason]))
                    table.add_row(escape(key.written), verdict, escape(effects))
        return table

    def _effect(self, setting: str) -> str:
        chosen = self.chosen(setting)
        is_overridden = setting in self.settings and chosen != self.settings[setting]
        return f"{setting}={as_text(chosen)}" + (" by option" if is_overridden else "")

    def settings_of_file(self) -> dict[str, Any]:
        """Return the settings that the file sets and no option overrides, by dotted names."""
        return {name: value for name, value in self.settings.items() if not self.is_option(name)}
