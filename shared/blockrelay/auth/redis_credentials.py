"""Who we are to a Redis whose password stands in a file: the file is read for every new connection.

So a password is rotated under running services. Connections that are there go on: Redis asks for no password again.
"""

from pathlib import Path
from typing import Any

from redis.credentials import CredentialProvider

from blockrelay.auth.password_file import PARAMETER, read_password
from blockrelay.errors import UsageError
from blockrelay.redis.errors import NO_PASSWORD, NoPassword


class PasswordInFile(CredentialProvider):
    """The user of an address, and the password that `file` has at the moment."""

    def __init__(self, user: str, file: Path) -> None:
        self.user, self.file = user, file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """What AUTH is given. A file that cannot be used is trouble like a password that Redis does not know."""
        try:
            password = read_password(self.file)
        except UsageError as error:
            raise NoPassword(str(error), status_code=NO_PASSWORD) from None
        return (self.user, password) if self.user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """The same without a thread: the file is small, and on this host."""
        return self.get_credentials()


def take_password_file(options: dict[str, Any]) -> None:
    """Turn the parameter of a URL among `options`, those of a pool's connections, into what redis-py asks for.

    Raises ValueError where there is a password, too.
    """
    file = options.pop(PARAMETER, None)
    if file is None:
        return
    if options.get("password"):
        raise ValueError(f"it has a password and a {PARAMETER}: keep one of them")
    options["credential_provider"] = PasswordInFile(options.pop("username", None) or "", Path(file))
