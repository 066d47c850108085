"""What every public function returns: something that prints, shows itself in a notebook, and can be stored and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar, overload

from normscope.core.codec import encode
from normscope.core.errors import InputError
from normscope.core.rendering import Rendered

T = TypeVar("T", covariant=True)


class Result(Rendered):
    """A result with a schema.

    schema: the name and version of what `to_dict` returns, under the key "schema"; it changes when a field changes its meaning.
    """

    schema: ClassVar[str]

    def __repr__(self) -> str:
        """One line: what it is, and the first line of what it prints."""
        first, *rest = str(self).splitlines() or [""]
        return f"<{type(self).__name__}: {first.rstrip()}{' …' if rest else ''}>"

    def to_dict(self) -> dict[str, Any]:
        """The result as plain values, beginning with its schema."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Any:
        """The result that `to_dict` described, as far as it can be told without the model."""
        raise InputError(f"a {cls.__name__} cannot be read back: it needs the model")

    def to_json(self, path: str | Path | None = None) -> str:
        """The result as JSON text, infinity as the string "inf" and NaN as null; written to `path` if one is given."""
        text = encode(self.to_dict())
        if path is not None:
            Path(path).write_text(text + "\n", encoding="utf-8")
        return text

    def to_html(self, path: str | Path) -> None:
        """The result as one page that needs no network."""
        from normscope.report.results import result_page

        Path(path).write_text(result_page(self), encoding="utf-8")

    @property
    def figures(self) -> tuple[str, ...]:
        """The names that `figure` takes."""
        return tuple(self._figures())

    def figure(self, name: str | None = None, **options: Any) -> Any:
        """A Plotly figure by its name; the first of `figures` without one."""
        drawn = self._figures()
        if not drawn:
            raise InputError(f"a {type(self).__name__} has no figure")
        if name is not None and name not in drawn:
            raise InputError(f"no figure {name!r}: choose from {', '.join(drawn)}")
        return drawn[next(iter(drawn)) if name is None else name](**options)

    def _figures(self) -> dict[str, Callable[..., Any]]:
        """What draws each figure, by name."""
        return {}


class ResultSequence(Result, Sequence[T]):
    """A result that is a sequence: of what its first field holds."""

    @property
    def _items(self) -> tuple[T, ...]:
        items: tuple[T, ...] = getattr(self, next(iter(self.__dataclass_fields__)))  # type: ignore[attr-defined]
        return items

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)
