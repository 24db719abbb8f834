"""The Jinja in which models' chat templates are written, as transformers sets it up. Needs `jinja2`.

A template comes with a model and is not trusted: it runs in Jinja's immutable sandbox.
"""

from jinja2 import Template, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from blockrelay.errors import BlockFolderError


def template_environment() -> ImmutableSandboxedEnvironment:
    """Without functions and filters that belong to a model's conversation."""
    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])


def compiled(environment: ImmutableSandboxedEnvironment, source: str, *, name: str = "the chat template") -> Template:
    """Raises BlockFolderError, which calls the template `name`, for what is not Jinja."""
    try:
        return environment.from_string(source)
    except TemplateSyntaxError as error:
        raise BlockFolderError(f"{name} is not Jinja: line {error.lineno}: {error.message}") from error
