"""Puts the tenant into the names of sessions and KV pages in Redis: no tenant finds another's. Pure."""

from dataclasses import replace

from blockrelay.auth.api_keys import Tenant
from blockrelay_gateway.admission.admission_request import AdmissionRequest


def scoped_session(tenant: str, session: str) -> str:
    """The session's name in Redis: the tenant, a slash, the client's id, which cannot contain a slash.

    Without a tenant ("") it is the client's id.
    """
    return f"{tenant}/{session}" if tenant else session


def scoped_salt(tenant: str, salt: str) -> str:
    """The salt of block hashes: the tenant, a NUL, the client's salt, which cannot contain a NUL.

    Without a tenant ("") it is the client's salt.
    """
    return f"{tenant}\0{salt}" if tenant else salt


def scoped(request: AdmissionRequest, tenant: Tenant) -> AdmissionRequest:
    """Returns `request` with salt and session in the tenant's own namespace; `body.session` stays the client's id."""
    body = replace(request.body, salt=scoped_salt(tenant.name, request.body.salt))
    session = request.session
    if session is not None:
        session = replace(session, session=scoped_session(tenant.name, session.session))
    return replace(request, body=body, session=session)
