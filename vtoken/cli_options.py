"""Fields of ``VTokenConfig`` as options of a command, each named after it and helped by its description."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from vtoken.config import VTokenConfig

PANEL = "What is evicted, and when"
OF_SERVERS = ("request_policies", "compress")
"""Fields that say what requests may ask for; those of our commands ask for nothing."""


def settings_options(without: Iterable[str] = OF_SERVERS) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a command the options; it receives those that were given as ``settings``, for ``VTokenConfig(**settings)``.

    Args:
        without: fields that are no options of the command.
    """
    fields = {name: field for name, field in VTokenConfig.model_fields.items() if name not in set(without)}

    def extend(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def extended(**arguments: Any) -> Any:
            texts = {name: arguments.pop(name) for name in fields}
            return command(**arguments, settings={name: text for name, text in texts.items() if text not in (None, [])})

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        parameters = own + [_parameter(name, field) for name, field in fields.items()]
        extended.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        extended.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return extended

    return extend


def read_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The values that the given texts mean; what means nothing is left for ``VTokenConfig`` to refuse.

    Raises:
        ValueError: one sentence, for a --policy-option that is not NAME=VALUE.
    """
    return {name: _read(VTokenConfig.model_fields[name], given) for name, given in settings.items()}


def read_number(text: str) -> int | float | str:
    """ "512" is a count, "0.25" a share; anything else stays as it is."""
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """One option. Texts are read after typer is done, so that a refusal is one sentence and not a page of usage."""
    kind: Any = str
    metavar: str | None = "NUMBER"
    flag = f"--{name.replace('_', '-')}"
    if field.annotation is bool:
        kind, metavar = bool, None
    elif _is_by_name(field):
        metavar = "NAME,..."
    elif get_origin(field.annotation) is dict:
        kind, metavar, flag = list[str], "NAME=VALUE", flag.removesuffix("s")
    elif get_origin(field.annotation) is Literal:
        metavar = "|".join(get_args(field.annotation))
    elif field.annotation is str:
        metavar = "NAME"
    elif _is_list(field):
        metavar = "NUMBER,..."
    default = None if field.default_factory else field.get_default()
    option = typer.Option(
        flag,
        help=field.description,
        metavar=metavar,
        show_default=False if default is None or default is False else str(default),
        rich_help_panel=PANEL,
    )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def _read(field: FieldInfo, given: Any) -> Any:
    if field.annotation is str or field.annotation is bool or get_origin(field.annotation) is Literal:
        return given
    if _is_by_name(field):
        return [part.strip() for part in given.split(",")]
    if get_origin(field.annotation) is dict:
        return dict(_pair(text) for text in given)
    if _is_list(field):
        return [read_number(part.strip()) for part in given.split(",")]
    return read_number(given)


def _is_list(field: FieldInfo) -> bool:
    return any(get_origin(kind) is list for kind in (field.annotation, *get_args(field.annotation)))


def _is_by_name(field: FieldInfo) -> bool:
    """Options by name, of which a command line gives the names alone."""
    return get_origin(field.annotation) is dict and get_origin(get_args(field.annotation)[1]) is dict


def _pair(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise ValueError(f"vtoken: option 'policy_option' = '{text}' is refused: write NAME=VALUE, such as decay=0.95.")
    return name, {"true": True, "false": False}.get(value.lower(), read_number(value))
