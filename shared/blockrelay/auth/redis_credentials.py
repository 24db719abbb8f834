"""Redis credentials from a password file, which is read for each new connection.

So a password can be rotated while services run. Existing connections continue, since Redis does not check them again.
"""

from pathlib import Path
from typing import Any

from redis.credentials import CredentialProvider

from blockrelay.auth.password_file import PARAMETER, read_password
from blockrelay.errors import UsageError
from blockrelay.redis.errors import NO_PASSWORD, NoPassword


class PasswordInFile(CredentialProvider):
    """The user of a Redis address, and the password that `file` has at the moment of connecting.

    An empty `user` is the default user of Redis.
    """

    def __init__(self, user: str, file: Path) -> None:
        self.user, self.file = user, file

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Returns the arguments of AUTH: user and password, or the password alone for the default user.

        Raises NoPassword if the file cannot be used.
        """
        try:
            password = read_password(self.file)
        except UsageError as error:
            raise NoPassword(str(error), status_code=NO_PASSWORD) from None
        return (self.user, password) if self.user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Returns the arguments of AUTH, and raises, as `get_credentials` does.

        It reads the file without a thread, since the file is small and local.
        """
        return self.get_credentials()


def take_password_file(options: dict[str, Any]) -> None:
    """Replaces `password_file` in `options` by the credential provider that redis-py takes; `username` goes into it.

    `options` are the keyword arguments of a pool's connections, and are changed in place. Without `password_file` they
    stay as they are. Raises ValueError if there is a password too.
    """
    file = options.pop(PARAMETER, None)
    if file is None:
        return
    if options.get("password"):
        raise ValueError(f"it has a password and a {PARAMETER}: keep one of them")
    options["credential_provider"] = PasswordInFile(options.pop("username", None) or "", Path(file))
